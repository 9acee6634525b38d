"""BatchCosts: peak memory and time of micro-batches of any size, predicted from one profile, for plans of batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.memory_simulator import plain_blocks_ms
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.price.codec_selection import resize_profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import quick_least_policy, recomputing_policies

LAUNCHES = 15
"""Time that a micro-batch spends on each operator of a block, whatever its size, in launches of the fastest operator:
Python and autograd take several times as long as the launches in forward and backward. Measured on a CPU: 13 to 19."""


class _Costs(NamedTuple):
    """Predictions for a size class."""

    plain_peak: int
    """Peak in bytes if everything is retained."""
    least_peak: int
    """Peak in bytes under full recomputation."""
    plain_ms: float
    recomputation_ms: float


class BatchCosts:
    """Predicted costs of micro-batches, from `profile`, which predicts other sizes (`Profile.sizes`).

    A batch of a size gets the policy of its size class, so the costs are those of the class. Whether it fits is decided
    by full recomputation: a policy that fits in addition, for example with codecs, would be slow for so large a batch.
    """

    def __init__(
        self,
        profile: Profile,
        config: AdaccConfig,
        budget_bytes: int,
        corrected: Callable[[Profile, Shapes], Profile] = lambda profile, _: profile,
    ) -> None:
        """`corrected` adds what the run has learned to the predicted profile of a size."""
        assert profile.sizes is not None
        self._profile, self._config, self._corrected = profile, config, corrected
        self._size_class = profile.sizes.size_class
        self.budget_bytes = int(budget_bytes / (1 + profile.sizes.uncertainty))
        """Budget in bytes, without room for the uncertainty of predicted peaks."""
        kinds = [profile.kind_of(block) for block in profile.blocks]
        launches = [op.ms for kind in kinds for op in kind.operators if op.ms > 0]
        self._launch_ms = LAUNCHES * len(launches) * min(launches, default=0.0)
        self.peak = cache(self._peak)
        self.ms = cache(self._ms)
        self._costs_of = cache(self._predicted_costs)

    def _ms(self, num_samples: int, sample: Shapes) -> float | None:
        """Return the milliseconds of a micro-batch of samples with the shapes `sample` (batches of one), under the
        fastest policy that fits, or None if none fits or the size cannot be predicted."""
        costs = self._at(num_samples, sample)
        if costs is None or costs.least_peak > self.budget_bytes:
            return None
        # The trade-off between memory and time is convex, and lies below this line.
        excess, saved = costs.plain_peak - self.budget_bytes, costs.plain_peak - costs.least_peak
        share = min(1.0, max(0.0, excess / saved)) if saved > 0 else 0.0
        return self._launch_ms + costs.plain_ms + share * costs.recomputation_ms

    def _peak(self, num_samples: int, sample: Shapes) -> int | None:
        """Return the predicted peak in bytes of the size class: the plain one, or, if it does not fit, the budget or
        the least one that is possible. None if the size cannot be predicted."""
        costs = self._at(num_samples, sample)
        return None if costs is None else min(costs.plain_peak, max(costs.least_peak, self.budget_bytes))

    def fits_alone(self, sample: Shapes) -> bool:
        """Return True if a policy fits a batch of one sample, of its own size rather than of its size class."""
        return self.least_peak(sample) <= self.budget_bytes

    def least_peak(self, sample: Shapes) -> int:
        """Return the smallest peak in bytes of a batch of one sample that a policy can reach."""
        return quick_least_policy(self._predicted(sample), self._config).predicted_peak_bytes

    def _at(self, num_samples: int, sample: Shapes) -> _Costs | None:
        """Return the predictions for the size class of a batch, or None if the size cannot be predicted."""
        size_class = self._size_class(with_samples(sample, num_samples))
        return None if size_class is None else self._costs_of(size_class)

    def _predicted_costs(self, size_class: Shapes) -> _Costs:
        profile = self._predicted(size_class)
        plain = uniform_policy(profile, Action.RETAIN)
        least = min(recomputing_policies(profile, self._config) or [plain], key=lambda p: p.predicted_peak_bytes)
        peaks = plain.predicted_peak_bytes, min(plain.predicted_peak_bytes, least.predicted_peak_bytes)
        return _Costs(*peaks, plain_blocks_ms(profile), least.predicted_overhead_ms)

    def _predicted(self, shapes: Shapes) -> Profile:
        return self._corrected(resize_profile(self._profile, shapes), shapes)


def with_samples(shapes: Shapes, num_samples: int) -> Shapes:
    """Return the shapes of a batch of `num_samples` samples, which are the first dimension of all tensors."""
    return tuple((name, (num_samples, *size[1:])) for name, size in shapes)


def longest_fitting(costs: BatchCosts, shapes_of: Callable[[int], Shapes], length: int) -> int:
    """Return the largest length below `length` of a sample that fits alone, or 0."""
    return bisect_right(range(1, length), False, key=lambda n: not costs.fits_alone(shapes_of(n)))
