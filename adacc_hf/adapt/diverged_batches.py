"""DivergedBatches: share, predicted overhead and predicted peak of micro-batches that diverged from their plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from adacc_hf.adapt.fallback_stats import full_recomputation, ratio
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe

if TYPE_CHECKING:
    from adacc_hf.adapt.size_policy import SizePolicy

log = logging.getLogger(__name__)


class DivergedBatches:
    """Micro-batches whose calls of blocks diverged from their plans.

    A call diverges if it runs under torch's checkpoint instead, or if it runs operators that were not profiled. Both
    are priced as full recomputation. In the methods, `reference` is the size policy whose
    profile describes a micro-batch of `shapes` best. `say` is called with a sentence for the run's history.
    """

    def __init__(self, config: AdaccConfig, say: Callable[[str], None]) -> None:
        self.has_diverged = False
        """True if most calls of the most recent micro-batch diverged."""
        self._config, self._say = config, say
        self._num_batches = self._num_diverged = 0
        """Micro-batches since the last call of `most_diverged`, and those of them in which most calls diverged."""
        self._full: tuple[Profile, Policy] | None = None
        """Cache of `_full_recomputation`: the last profile and its policy."""
        self._reported: set[bool] = set()
        """Reports that `_report_excess` has made: False for one without a predicted excess, True for one with it."""

    def add(self, share: float) -> None:
        """Record a micro-batch and the `share` of its calls that diverged."""
        self.has_diverged = share > 0.5
        self._num_batches += 1
        self._num_diverged += self.has_diverged

    def most_diverged(self) -> bool:
        """Return True if most micro-batches since the last call of this method diverged."""
        is_majority = 2 * self._num_diverged > self._num_batches
        self._num_batches = self._num_diverged = 0
        return is_majority

    def overhead_ms(self, shapes: BatchShapes, reference: SizePolicy, memory_budget: str | float | int) -> float:
        """Return the predicted overhead of a micro-batch in which all calls diverged.

        Report, once per run, that such batches may exceed the budget. If a batch is predicted to exceed it, report the
        excess, also once per run.
        """
        profile, size = reference.replanner.profile, ratio(shapes, reference.shapes)
        recomputing, budget = self._full_recomputation(profile), Budget.resolve(memory_budget, profile, self._config)
        peak = int(profile.static_bytes + size * (recomputing.predicted_peak_bytes - profile.static_bytes))
        if budget.limits_peak:
            self._report_excess(shapes, max(0, peak - budget.nbytes), memory_budget)
        return recomputing.predicted_overhead_ms * size

    def may_record(self, shapes: BatchShapes, reference: SizePolicy, memory_budget: str | float | int) -> bool:
        """Return True if the micro-batch fits the budget even while a block's call is being recorded.

        Recording keeps every intermediate tensor of the block alive. The other blocks are assumed to run with the least
        memory or, if the micro-batch is smaller than the batch of `reference`, under the policy of `reference`.
        """
        profile, policy = reference.replanner.profile, reference.replanner.policy
        budget = Budget.resolve(memory_budget, profile, self._config)
        if not budget.limits_peak:
            return True
        size = ratio(shapes, reference.shapes)
        peak = (policy if size < 1 else self._full_recomputation(profile)).predicted_peak_bytes
        block_bytes = max(sum(value.nbytes for value in kind.values if value.shared is None) for kind in profile.kinds)
        return profile.static_bytes + size * (peak - profile.static_bytes + block_bytes) <= budget.nbytes

    def _full_recomputation(self, profile: Profile) -> Policy:
        if self._full is None or self._full[0] is not profile:
            self._full = profile, full_recomputation(profile)
        return self._full[1]

    def _report_excess(self, shapes: BatchShapes, excess_bytes: int, memory_budget: str | float | int) -> None:
        has_excess = excess_bytes > 0
        if has_excess in self._reported:
            return
        self._reported |= {has_excess, False}
        amount = f"takes up to about {excess_bytes} bytes" if has_excess else "may take"
        text = (
            f"a batch of {describe(shapes)} did not follow a policy, and {amount} more than memory_budget="
            f"{memory_budget!r} allows: to avoid this, set dataloader_drop_last=True, or pad all batches to one length"
        )
        log.log(logging.WARNING if has_excess else logging.INFO, "Adacc: %s", text)
        self._say(text)
