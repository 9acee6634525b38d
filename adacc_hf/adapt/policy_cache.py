"""The policies of a run by the size of the batch, and their figures for logs and history.

Sizes are put into classes, a quarter apart (size_model.py), and each class that comes gets a policy before its first
batch runs: its profile is told from the one that was measured. Where a model takes no parts of a batch, so that sizes
were not measured, a batch runs under the policy of the smallest profiled size that it fits in; one that fits in none
runs under torch's own checkpoint, until its like was seen often enough to be profiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adacc_hf.adapt.checkpoint_files import SavedSizePolicy
from adacc_hf.adapt.replanner import Replanner, Tracking
from adacc_hf.adapt.step_timer import StepTimes
from adacc_hf.artifacts.files import note_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import ProfileSizes
from adacc_hf.run.policy_handle import BlockPlans, PolicyHandle
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    size_class_of,
    fits_in,
    from_profile_shapes,
    num_elements,
    smallest_enclosing,
    to_profile_shapes,
)

if TYPE_CHECKING:
    from adacc_hf.adapt.controller import Controller

ENOUGH_SEEN = 8
"""Batches of a bucket without a policy of its own that are worth a profile, which takes as long as 20 to 60 steps."""
MAX_SHAPE_POLICIES = 16
"""Policies per run that follow the data. Classes that come later run under what suits them best of these."""
MAX_OTHERS = 64
"""Classes that do so and are remembered."""
MAX_UNPLANNED = 256
"""Buckets without a policy of their own that are counted; the one that was not seen for longest goes. Batches of any
tensors may have a new one each, and all ranks tell each other of them."""


@dataclass(slots=True)
class SizePolicy:
    """One size of batch, and how training goes at that size."""

    shapes: BatchShapes | None
    """The sizes that it was profiled at; None where they are not known."""
    replanner: Replanner
    plans: BlockPlans
    due: int | None = None
    """The step at whose end the solver's result is taken over."""
    must_solve: bool = False
    """Whether prices changed while the solver was busy."""
    is_provisional: bool = False
    """Whether the policy is that of least memory, until a whole step was counted."""
    must_count: bool = True
    """Whether the memory of a step is still to be counted under the present actions."""
    is_told: bool = False
    """Whether its profile was told from that of another size."""
    num_steps: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    is_fresh: bool = False
    """Whether no step has run under the present plans, which get ready at their first."""
    predicted_step_ms: float | None = None
    error: float | None = None
    """Largest round-trip error at the last tracking step."""
    gradient_error: float | None = None
    measured_peak_bytes: int | None = None

    def saved(self) -> SavedSizePolicy:
        """What a run needs to go on at this size."""
        replanner = self.replanner
        return SavedSizePolicy(
            policy=replanner.policy,
            profile=replanner.priced,
            prices=None if replanner.profile == replanner.priced else replanner.profile,
            searched=None if replanner.searched == replanner.priced else replanner.searched,
            shapes=self.shapes,
            due=self.due,
            num_tracked=replanner.num_tracked,
            memory_budget=replanner.memory_budget,
            is_provisional=self.is_provisional,
            is_told=self.is_told,
        )

    def go_on(self, record: SavedSizePolicy) -> None:
        """Go on where `saved` was written; what the solver had begun is begun anew."""
        self.replanner.num_tracked, self.due = record.num_tracked, record.due
        self.is_provisional = record.is_provisional
        if record.memory_budget is not None:
            self.replanner.memory_budget = record.memory_budget
        if record.prices is not None:
            self.replanner.profile = record.prices
        if record.searched is not None:
            self.replanner.searched = record.searched
        if self.due is not None:
            self.replanner.start_solving()


@dataclass(slots=True)
class _Unplanned:
    """A bucket that has no policy for some of its batches."""

    shapes: BatchShapes
    num_seen: int = 0


class PolicyCache:
    """All of a run. `choose` is asked for every batch and never synchronises."""

    def __init__(self) -> None:
        self.all: list[SizePolicy] = []
        self.others: OrderedDict[BatchShapes, BlockPlans] = OrderedDict()
        """Plans for classes that have no shape policy."""
        self.counted: OrderedDict[BatchShapes, _Unplanned] = OrderedDict()
        """Buckets some of whose batches have no policy of their own."""
        self._refused: set[BatchShapes] = set()
        self.above_budget: OrderedDict[Hashable, None] = OrderedDict()
        """Classes at whose own sizes nothing keeps to a budget, with the budget and the codecs that are off."""
        self.least: Policy | None = None
        """The policy of least memory that was found last for a size at which nothing keeps to the budget."""
        self.may_measure = True
        """Whether a profile may tell of all sizes: none has shown yet that the model takes no parts of a batch."""

    def add(self, size_policy: SizePolicy) -> None:
        """Take the place of a shape policy of the same sizes, or of any smaller ones of its bucket that were
        profiled."""
        shapes = size_policy.shapes
        if shapes is None:
            self.all = [size_policy]
            return
        self.all = [s for s in self.all if not self._is_replaced(s, size_policy)] + [size_policy]
        self.others.pop(shapes, None)
        self.counted.pop(size_class_of(shapes), None)

    @staticmethod
    def _is_replaced(old: SizePolicy, new: SizePolicy) -> bool:
        if old.shapes is None or new.shapes is None:
            return False
        if old.shapes == new.shapes:
            return True
        return (
            new.replanner.profile.sizes is None and not new.is_told and size_class_of(old.shapes) == size_class_of(new.shapes)
        )

    @property
    def measured(self) -> SizePolicy | None:
        """The latest one whose profile tells of other sizes."""
        known = [s for s in self.all if s.shapes is not None and s.replanner.profile.sizes is not None]
        return known[-1] if known else None

    def told_from(self) -> tuple[SizePolicy, ProfileSizes]:
        """`measured`, and what its profile tells of other sizes; there is one where there is a class of sizes."""
        measured = self.measured
        assert measured is not None
        sizes = measured.replanner.profile.sizes
        assert sizes is not None
        return measured, sizes

    def class_of(self, shapes: BatchShapes) -> BatchShapes | None:
        """The class of sizes that a batch belongs to; None where that cannot be told."""
        if self.measured is None:
            return None
        found = self.told_from()[1].class_of(to_profile_shapes(shapes))
        return None if found is None else from_profile_shapes(found)

    def at(self, sizes: BatchShapes) -> SizePolicy | None:
        """The shape policy of a class."""
        return next((size_policy for size_policy in self.all if size_policy.shapes == sizes), None)

    def other(self, sizes: BatchShapes, shapes: BatchShapes) -> BlockPlans | None:
        """The plans of a class without a shape policy, or of the sizes of one of its batches."""
        return self.others.get(sizes) or self.others.get(shapes)

    def around(self, shapes: BatchShapes) -> SizePolicy | None:
        """The shape policy that keeps a batch of `shapes`, whose class is unknown, within the budget at least cost.

        None if none does.
        """
        fitting = [s for s in self.all if s.shapes is None or fits_in(shapes, s.shapes)]
        best = min(fitting, key=lambda s: 0 if s.shapes is None else num_elements(s.shapes), default=None)
        bucket = size_class_of(shapes)
        if best is None or (best.shapes is not None and size_class_of(best.shapes) != bucket):
            self._see(bucket, shapes, ENOUGH_SEEN if best is None and self.may_measure else 1)
        return best

    def refuse(self, shapes: BatchShapes) -> None:
        """No policy fits the bucket of `shapes`: it stays under torch's checkpoint, or a larger one's policy."""
        self._refused.add(size_class_of(shapes))
        self.counted.pop(size_class_of(shapes), None)

    def _see(self, bucket: BatchShapes, shapes: BatchShapes, weight: int) -> None:
        if bucket in self._refused:
            return
        known = self.counted.get(bucket) or _Unplanned(shapes)
        note_latest(self.counted, bucket, known, MAX_UNPLANNED)
        known.shapes = smallest_enclosing(known.shapes, shapes)
        known.num_seen += weight

    def unplanned(self) -> dict[BatchShapes, tuple[BatchShapes, int]]:
        """Per bucket without a policy of its own: the sizes that were seen, and how often."""
        return {bucket: (seen.shapes, seen.num_seen) for bucket, seen in self.counted.items()}


class InForce:
    """What the run's micro-batches run under."""

    def __init__(self, handle: PolicyHandle) -> None:
        self.size_policy: SizePolicy | None = None
        """None under torch's checkpoint, and under plans that are in no shape policy's force."""
        self.plans: BlockPlans | None = None
        self.shapes: BatchShapes = ()
        """Sizes of the last micro-batch."""
        self.lasts = False
        """Whether the next micro-batch runs under the same if it has the same sizes."""
        self.largest: BatchShapes = ()
        """Sizes of the largest micro-batch of the step."""
        self.used: dict[int, SizePolicy | None] = {}
        """The plans of the step's micro-batches, by identity; None for those that are in no shape policy's force."""
        self._handle = handle

    def put(self, size_policy: SizePolicy | None, plans: BlockPlans | None) -> None:
        """Run the next micro-batch under `plans`."""
        self._handle.follow(plans)
        self.size_policy, self.plans, self.lasts = size_policy, plans, False

    def begin_step(self) -> None:
        """Forget the micro-batches of the last step."""
        self.used.clear()
        self.largest = ()

    def runs(self, shapes: BatchShapes) -> None:
        """Note a micro-batch of these sizes."""
        self.used[id(self.plans)] = self.size_policy
        if shapes != self.largest and num_elements(shapes) > num_elements(self.largest):
            self.largest = shapes

    def ran_alone(self) -> bool:
        """Whether all of the last step ran under the present policy."""
        return self.size_policy is not None and all(plans == id(self.size_policy.plans) for plans in self.used)

    def used_shape_policies(self) -> list[SizePolicy | None]:
        """Those of the step's micro-batches; None for micro-batches under torch's checkpoint, or that were recorded."""
        return list(self.used.values()) or [self.size_policy]


def most_wanted(seen: list[dict[BatchShapes, tuple[BatchShapes, int]]]) -> BatchShapes | None:
    """The sizes worth a profile from what all ranks have seen; None if no bucket was seen often enough."""
    total: dict[BatchShapes, tuple[BatchShapes, int]] = {}
    for rank in seen:
        for bucket, (shapes, count) in rank.items():
            before, counted = total.get(bucket, (shapes, 0))
            total[bucket] = smallest_enclosing(before, shapes), counted + count
    wanted = [(count, num_elements(shapes), shapes) for shapes, count in total.values() if count >= ENOUGH_SEEN]
    return max(wanted, key=lambda item: item[:2])[2] if wanted else None


# Figures of a policy and of how training goes under it, for the Trainer's log and the run's history.


def predictions(policy: Policy) -> dict[str, float]:
    return {
        "stored_bytes": policy.predicted_stored_bytes,
        "peak_bytes": policy.predicted_peak_bytes,
        "overhead_ms": policy.predicted_overhead_ms,
    }


def tracking_figures(size_policy: SizePolicy, found: Tracking) -> dict[str, Any]:
    """What a tracking step found, beside how training went until then."""
    replanner = size_policy.replanner
    figures: dict[str, Any] = {
        "reason": found.reason,
        "num_outliers": found.num_outliers,
        "errors": found.errors,
        "compression_rate": replanner.policy.predicted_stored_bytes / replanner.profile.plain_stored_bytes,
    }
    if found.gradients:
        figures["gradient_error"] = max(gradient.error for gradient in found.gradients.values())
        figures["gradient_cosine"] = min(gradient.cosine for gradient in found.gradients.values())
    return figures | step_times(size_policy)


def step_times(size_policy: SizePolicy) -> dict[str, float]:
    """Measured and predicted time of a step under the present policy, as far as they are known."""
    times = {"step_ms": size_policy.times.median_ms, "predicted_step_ms": size_policy.predicted_step_ms}
    return {name: value for name, value in times.items() if value is not None}


def moved(before: Policy, after: Policy) -> tuple[int, int]:
    """How many activations of all blocks have another action or codec, and how many another number of channels."""
    actions = channels = 0
    for block, _ in before.blocks:
        old = dict(before.plan_of(block).choices)
        for value, choice in after.plan_of(block).choices:
            was = old.get(value, choice)
            actions += (was.action, was.codec) != (choice.action, choice.codec)
            channels += (was.action, was.codec) == (choice.action, choice.codec) and was.options != choice.options
    return actions, channels


def metrics(
    policy: Policy, profile: Profile | None, controller: Controller | None, overhead_ms: float | None
) -> dict[str, float]:
    """What the Trainer's log gets; `overhead_ms` is that of what has run."""
    found: dict[str, float | None] = {
        "adacc/stored_gib": policy.predicted_stored_bytes / 2**30,
        "adacc/peak_gib": policy.predicted_peak_bytes / 2**30,
        "adacc/overhead_ms": policy.predicted_overhead_ms if overhead_ms is None else overhead_ms,
    }
    if profile is not None:
        found["adacc/compression_rate"] = policy.predicted_stored_bytes / profile.plain_stored_bytes
    if controller is not None:
        shown = controller.shown
        peak = shown.measured_peak_bytes
        found["adacc/measured_peak_gib"] = None if peak is None else peak / 2**30
        is_exact = not shown.replanner.has_work()
        found["adacc/error"] = 0.0 if is_exact else shown.error
        found["adacc/gradient_error"] = 0.0 if is_exact else shown.gradient_error
        found["adacc/tracking_ms"] = controller.tracking_ms
    return {name: value for name, value in found.items() if value is not None}
