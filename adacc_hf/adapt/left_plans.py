"""Batches that leave their plans, for torch's checkpoint or for operators that were not profiled: what they cost and
take, and a fresh start with one of them where most do."""

from __future__ import annotations

import logging
from collections.abc import Callable

from adacc_hf.adapt.shape_policies import ShapePolicy
from adacc_hf.adapt.what_ran import full_recomputation, ratio
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe

log = logging.getLogger(__name__)


MORE_BLOCKS = "more blocks are trained than before"
OTHER_OPERATORS = "most batches run other operators than the profiled one"
"""Why a run may start over with another batch."""
LEFT_AS = {MORE_BLOCKS: "under torch's checkpoint", OTHER_OPERATORS: "with the least memory"}
"""How their calls run until then."""
MOST_TRIES = 64
"""Steps that may bring a batch to start over with, once one is wanted; with several ranks each is a collective."""


class LeftPlans:
    """Micro-batches whose calls left their plans, for torch's checkpoint or another path: what they cost and take.

    `reference` is the shape policy whose profile tells most of a micro-batch of `shapes`; `say` puts a sentence into
    the run's history.
    """

    def __init__(self, config: AdaccConfig, say: Callable[[str], None]) -> None:
        self.has_left = False
        """Whether most calls of the last micro-batch did."""
        self._config, self._say = config, say
        self._num_ran = self._num_left = 0
        """Micro-batches since they were last asked for, and those of them most of whose calls left their plans."""
        self._full: tuple[Profile, Policy] | None = None
        """Full recomputation as one profile has it."""
        self._said: set[bool] = set()
        """Whether by how much, of what was said of batches that may be over budget."""

    def ran(self, share: float) -> None:
        """A micro-batch ran, and this share of its calls left their plans."""
        self.has_left = share > 0.5
        self._num_ran += 1
        self._num_left += self.has_left

    def most_did(self) -> bool:
        """Whether most micro-batches left their plans since this was last asked."""
        most = 2 * self._num_left > self._num_ran
        self._num_ran = self._num_left = 0
        return most

    def overhead_ms(self, shapes: BatchShapes, reference: ShapePolicy, memory_budget: str | float | int) -> float:
        """Overhead of a micro-batch all of whose calls ran under full recomputation; says, once, that such batches may
        be over budget, and once more by how much where that is told."""
        profile, size = reference.rectifier.profile, ratio(shapes, reference.shapes)
        least, budget = self._full_recomputation(profile), Budget.resolve(memory_budget, profile, self._config)
        peak = int(profile.static_bytes + size * (least.predicted_peak_bytes - profile.static_bytes))
        if budget.of_peak:
            self._say_excess(shapes, max(0, peak - budget.nbytes), memory_budget)
        return least.predicted_overhead_ms * size

    def may_record(self, shapes: BatchShapes, reference: ShapePolicy, memory_budget: str | float | int) -> bool:
        """Whether a micro-batch keeps to the budget while a block's call is recorded, which holds all that it makes.

        At the size of a policy a path of its own is run with the least memory; a smaller size may follow the policy.
        """
        profile, policy = reference.rectifier.profile, reference.rectifier.policy
        budget = Budget.resolve(memory_budget, profile, self._config)
        if not budget.of_peak:
            return True
        size = ratio(shapes, reference.shapes)
        peak = (policy if size < 1 else self._full_recomputation(profile)).predicted_peak_bytes
        held = max(sum(value.nbytes for value in kind.values if value.shared is None) for kind in profile.kinds)
        return profile.static_bytes + size * (peak - profile.static_bytes + held) <= budget.nbytes

    def _full_recomputation(self, profile: Profile) -> Policy:
        if self._full is None or self._full[0] is not profile:
            self._full = profile, full_recomputation(profile)
        return self._full[1]

    def _say_excess(self, shapes: BatchShapes, nbytes: int, memory_budget: str | float | int) -> None:
        is_told = nbytes > 0
        if is_told in self._said:
            return
        self._said |= {is_told, False}
        taken = f"takes up to some {nbytes} bytes" if is_told else "may take"
        text = (
            f"a batch of {describe(shapes)} ran otherwise than a policy says, which {taken} more than "
            f"memory_budget={memory_budget!r} allows: set dataloader_drop_last=True, or pad to one length, to have none"
        )
        log.log(logging.WARNING if is_told else logging.INFO, "Adacc: %s", text)
        self._say(text)


class FreshStart:
    """The batch that a run wants to start over with, if it does: one to profile in place of the first."""

    def __init__(self) -> None:
        self.why = ""
        self.num_tries = 0
        """Steps that may still bring it; 0 if none is wanted."""
        self.tried: set[str] = set()
        """What the run has wanted to start over for."""

    def want(self, why: str) -> None:
        self.why, self.num_tries = why, MOST_TRIES
        self.tried.add(why)

    def takes(self, is_whole: bool, has_left: bool) -> bool:
        """Whether the last batch is it: one that called all blocks that any batch has trained so far (`is_whole`), by
        the operators that most batches run. Counts as a try."""
        self.num_tries -= 1
        return is_whole and (has_left or self.why != OTHER_OPERATORS)
