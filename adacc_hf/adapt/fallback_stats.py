"""What the micro-batches and steps of a run really ran under, for the Trainer's log and the run's report; and what
those cost that left their plans."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.batch_shapes import BatchShapes, describe, num_elements

if TYPE_CHECKING:
    from adacc_hf.adapt.policy_cache import SizePolicy

log = logging.getLogger(__name__)

NO_POLICY = "full recomputation, as no policy is for batches of their size"
UNCOMPILED = "a forward without compiled graphs, under no budget"


class FallbackStats:
    """Counts the steps of which some call ran otherwise than a policy says, and adds up what policies cost.

    Each such step is counted once, under the reason that most of its calls had, in a record of the run's history.
    """

    def __init__(self) -> None:
        self._why: Counter[str] = Counter()
        """Why calls of the step ran otherwise."""
        self._ms: list[float] = []
        """Predicted overhead of the micro-batches since the last log."""
        self._early: list[BatchShapes | None] = []
        """Those of them that ran before there was a policy."""
        self._last_ms: float | None = None

    def ran_early(self, shapes: BatchShapes | None) -> None:
        """A micro-batch ran under full recomputation, before there was a policy."""
        self._early.append(shapes)

    def ran(self, overhead_ms: float, why: Mapping[str, int]) -> None:
        """A micro-batch ran, of which so many calls were otherwise than the policy says, by why."""
        self._ms.append(overhead_ms)
        self._why.update(why)

    def policy_is_set(self, profile: Profile | None, shapes: BatchShapes | None) -> None:
        """The early micro-batches are known to have cost what `profile`, of a batch of `shapes`, says."""
        if self._early and profile is not None:
            whole_ms = full_recomputation(profile).predicted_overhead_ms
            self._ms += [whole_ms * ratio(early, shapes) for early in self._early]
        self._early.clear()

    def step_ends(self, step: int, history: list[dict[str, Any]]) -> bool:
        """Count the step; returns whether history has changed."""
        if not self._why:
            return False
        ((why, _),) = self._why.most_common(1)
        self._why.clear()
        for record in history:
            if record["event"] == FALLBACK and record["reason"] == why:
                record[STEPS] += 1
                return True
        history.append({"step": step, "event": FALLBACK, "reason": why, STEPS: 1})
        return True

    def logged(self) -> None:
        """The micro-batches to come belong to the next log."""
        self._last_ms = self.overhead_ms
        self._ms.clear()
        self._early.clear()

    @property
    def overhead_ms(self) -> float | None:
        """Mean over the micro-batches since the last log; the last log's if there was none; None before any."""
        return sum(self._ms) / len(self._ms) if self._ms else self._last_ms


def full_recomputation(profile: Profile) -> Policy:
    """What torch's checkpoint, or a path with the least memory, comes to for a batch as the profiled one."""
    return uniform_policy(profile, Action.RECOMPUTE)


def ratio(shapes: BatchShapes | None, other: BatchShapes | None) -> float:
    """How much larger a batch of `shapes` is than one of `other`; 1 where either is not known."""
    if shapes == other:
        return 1.0
    names = {shape.name for shape in shapes or ()} & {shape.name for shape in other or ()}
    mine, theirs = (num_elements(tuple(s for s in each or () if s.name in names)) for each in (shapes, other))
    return mine / theirs if mine and theirs else 1.0


# Steps that ran otherwise than the policy says: how many, and why.

FALLBACK = "fallback"
"""The event of a run's history that counts such steps."""
STEPS = "fallback_steps"
BEFORE = "full recomputation, before there was a policy"


def num_fallback_steps(history: Sequence[Mapping[str, Any]]) -> int:
    """Steps of the run so far that ran, all or in part, otherwise than a policy says."""
    return sum(fallback_reasons(history).values())


def fallback_reasons(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many there were by why; what sets the first policy tells of the steps before it."""
    found: dict[str, int] = {}
    for record in history:
        if record.get(STEPS):
            why = record["reason"] if record["event"] == FALLBACK else BEFORE
            found[why] = found.get(why, 0) + record[STEPS]
    return found


def describe_fallbacks(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on how many there were, and one on each reason; none without a history."""
    if not history:
        return []
    reasons, number = fallback_reasons(history), num_fallback_steps(history)
    if not reasons:
        return ["All steps ran under their policies."]
    begins = f"{number} {'step' if number == 1 else 'steps'} ran otherwise than the policy says, all or in part:"
    return [begins, *(f"{steps}: {why}" for why, steps in reasons.items())]


# Batches that leave their plans, for torch's checkpoint or for operators that were not profiled: what they cost and
# take, and a fresh start with one of them where most do.

MORE_BLOCKS = "more blocks are trained than before"
OTHER_OPERATORS = "most batches run other operators than the profiled one"
"""Why a run may start over with another batch."""
LEFT_AS = {MORE_BLOCKS: "under torch's checkpoint", OTHER_OPERATORS: "with the least memory"}
"""How their calls run until then."""
MOST_TRIES = 64
"""Steps that may bring a batch to start over with, once one is wanted; with several ranks each is a collective."""


class DivergedBatches:
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

    def overhead_ms(self, shapes: BatchShapes, reference: SizePolicy, memory_budget: str | float | int) -> float:
        """Overhead of a micro-batch all of whose calls ran under full recomputation; says, once, that such batches may
        be over budget, and once more by how much where that is told."""
        profile, size = reference.replanner.profile, ratio(shapes, reference.shapes)
        least, budget = self._full_recomputation(profile), Budget.resolve(memory_budget, profile, self._config)
        peak = int(profile.static_bytes + size * (least.predicted_peak_bytes - profile.static_bytes))
        if budget.of_peak:
            self._say_excess(shapes, max(0, peak - budget.nbytes), memory_budget)
        return least.predicted_overhead_ms * size

    def may_record(self, shapes: BatchShapes, reference: SizePolicy, memory_budget: str | float | int) -> bool:
        """Whether a micro-batch keeps to the budget while a block's call is recorded, which holds all that it makes.

        At the size of a policy a path of its own is run with the least memory; a smaller size may follow the policy.
        """
        profile, policy = reference.replanner.profile, reference.replanner.policy
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


class Restart:
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
