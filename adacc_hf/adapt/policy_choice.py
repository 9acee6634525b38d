"""PolicyChoice: the choice of a policy for each micro-batch, which depends on the sizes of the micro-batch's tensors.

NOTE [Choice of a policy]. Sizes are grouped into classes, each 25 % larger than the class below
(artifacts/size_model.py). A class has one record, a `SizePolicy`. A micro-batch gets its policy here and nowhere else,
and policies are replaced here and nowhere else, at once, by the rank that needs it.
| micro-batch | policy |
|---|---|
| in a class with a record, or in a recorded size of the class | the record's, solved again if corrections require it |
| in a new class | the fastest policy of the run, or full recomputation, that fits; a solver run follows when it pays |
| in a new class, if none of these fits | solved for the class, or, if none fits the class, for the batch's own sizes |
| in no class | that of the smallest recorded sizes around it, else torch's checkpoint, and it may be recorded |
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adacc_hf.adapt.corrections import with_static_memory
from adacc_hf.adapt.history import NO_POLICY, describe_costs, predictions
from adacc_hf.adapt.policy_checks import ALL_BLOCKS, SAME_SIZE, refuse_uncovered
from adacc_hf.adapt.policy_fit import PolicyFit, current_policy, distinct, uses_up
from adacc_hf.adapt.run_state import RunState
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.run.entries import OTHER_OPERATORS
from adacc_hf.run.policy_handle import BlockPlans, PolicyHandle
from adacc_hf.torch_glue.batch_shapes import batch_shapes, describe, fits_in, num_elements
from adacc_hf.torch_glue.memory import batch_bytes
from adacc_hf.torch_glue.progress import announce, reported_if_slow

MAX_SIZES = 64
"""Number of size classes that a run remembers. The least recently used one is dropped."""
FEW_PROFILES, MOST_PROFILES = 6, 16
"""Number of profiles up to which each size that no profile predicts is recorded, because profiles of a few sizes
predict all others, and the number up to which sizes are recorded that do not fit in a recorded one."""

SOLVER_MS = 300.0
"""Assumed time of a solver run for a size class. A policy may lose as much time before the class is solved."""


@dataclass(slots=True, eq=False)
class SizePolicy:
    """Record of a run for one size class: the profile and the policy of its batches, and measurements of its steps."""

    shapes: Shapes | None
    """Sizes of the batch that the policy was made for, or None if unknown."""
    base: Profile
    """Profile for these sizes, recorded or predicted from other sizes."""
    profile: Profile
    """`base` with the run's corrections (`Corrections.applied`)."""
    policy: Policy
    plans: BlockPlans
    version: int
    """Version of the corrections in `profile`."""
    must_measure: bool
    """True if the memory of a step is to be measured under the current actions."""
    num_waiting: int = 0
    """Number of batches under a policy that a solver run may improve. 0 if a run would find no faster one."""
    error: float | None = None
    """Largest round-trip error in the last tracking step."""
    gradient_error: float | None = None
    measured_peak_bytes: int | None = None


class PolicyChoice:
    """Policies of a run by batch size, the active policy, and the sizes of the current step's micro-batches."""

    def __init__(self, handle: PolicyHandle, run: RunState) -> None:
        self.records: OrderedDict[Shapes | None, SizePolicy] = OrderedDict()
        """Record of each size class, the least recently used first."""
        self.fit = PolicyFit(run)
        self.current: SizePolicy | None = None
        """Record that the blocks follow now. None under torch's checkpoint."""
        self.shapes: Shapes = ()
        """Sizes of the most recent micro-batch."""
        self.nbytes = 0
        """Bytes of the tensors in the most recent micro-batch."""
        self._sizes: list[tuple[str, torch.Size]] = []
        self._has_shapes = False
        """False from the begin of a micro-batch until its tensors are known."""
        self.largest: Shapes = ()
        """Sizes of the largest micro-batch of the step."""
        self.batch_bytes = 0
        """Bytes of the largest micro-batch of the step."""
        self.used: set[SizePolicy | None] = set()
        """Records under which the step's micro-batches ran. None stands for torch's checkpoint."""
        self.has_changed = False
        """True if a policy was set or replaced in the current step."""
        self.is_unpredicted = False
        """True if no profile predicts the micro-batch's sizes, and they may be recorded."""
        self.num_profiles = 0
        self._num_batches = self._num_diverged = 0
        """Numbers of micro-batches since the last call of `most_diverged`: of all, and of those in which most block
        calls did not follow their plan."""
        self._run, self._handle = run, handle

    @property
    def shown(self) -> SizePolicy:
        """Record of the most recent micro-batch, or, if that ran under torch's checkpoint, the record used before."""
        return self.current or self.records[next(reversed(self.records))]

    @property
    def idle_blocks(self) -> set[str]:
        """Names of the blocks that ran without gradients when profiled, for which policies have no actions."""
        return set().union(*(record.policy.idle_blocks for record in self.records.values()))

    def begin_step(self) -> None:
        """Drop what is known of the previous step's micro-batches."""
        self.used.clear()
        self.largest, self.batch_bytes, self.has_changed = (), 0, False

    def begin_micro_batch(self) -> None:
        """Begin the next micro-batch, whose sizes are not known yet."""
        self._has_shapes = False

    def read(self, inputs: Any) -> None:
        """Read the sizes of a micro-batch from the mapping `inputs`, once, and apply the policy for them. `inputs` may
        be None at first: in reinforcement learning, the tensors are sampled within the step."""
        if self._has_shapes or not isinstance(inputs, Mapping):
            return
        self._has_shapes = True
        sizes = [(name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        current, version = self.current, self._run.corrections.version
        is_same = sizes == self._sizes  # `batch_shapes` takes time
        if not is_same:
            self._sizes, self.shapes, self.nbytes = sizes, batch_shapes(inputs), batch_bytes(inputs)
        self.batch_bytes = max(self.batch_bytes, self.nbytes)
        if not is_same or current is None or current.version != version or current.num_waiting or self.is_unpredicted:
            self._choose(self.shapes)
        self.used.add(self.current)
        if not self.largest or num_elements(self.shapes) > num_elements(self.largest):
            self.largest = self.shapes

    def _choose(self, shapes: Shapes) -> None:
        sizes = self.fit.class_of(shapes)
        record = self.records.get(sizes) or self._smallest_around(shapes, sizes)
        if sizes is None:
            limit = MOST_PROFILES if record is None else FEW_PROFILES
            is_recorded = record is not None and record.shapes in (None, shapes)
            self.is_unpredicted = not is_recorded and self.num_profiles < limit
        else:
            self.is_unpredicted = False
            record = record or self._new(sizes, shapes)
        if record is not None:
            self.records.move_to_end(record.shapes)
            self.refresh(record)
            self._solve_if_it_pays(record)
        if record is not self.current:
            self._put(record)
        if record is None:
            reason = f"no profile predicts batches of {describe(shapes)}"
            refuse_uncovered(self._run.config, ALL_BLOCKS, reason, SAME_SIZE)
            budget = self._run.budget(self.shown.profile)
            if not self.is_unpredicted and budget.limits_peak:  # a batch that is recorded gets a policy right away
                self._run.warn_of_memory(
                    f"a batch runs under torch's checkpoint, because {reason}, and may take more than memory_budget="
                    f"{budget.setting!r} allows: to avoid this, {SAME_SIZE}",
                    key=shapes,
                )

    def _smallest_around(self, shapes: Shapes, bounds: Shapes | None) -> SizePolicy | None:
        """Return the record of the smallest sizes in which `shapes` fits, within the `bounds` of its class, if any."""
        around = [
            record
            for other, record in self.records.items()
            if other is not None and fits_in(shapes, other) and (bounds is None or fits_in(other, bounds))
        ]
        return min(around, key=lambda record: num_elements(record.shapes or ()), default=None)

    def _new(self, sizes: Shapes, shapes: Shapes) -> SizePolicy:
        """Make the record of the class `sizes`, or of the batch's own sizes, if no policy fits the class's bounds."""
        policies = distinct(record.policy for record in self.records.values())
        names = dict(sizes)
        own_sizes = tuple((name, size) for name, size in shapes if name in names)
        with reported_if_slow(f"solving for batches of {describe(sizes)}"):
            for bounds in (sizes, own_sizes):
                base = self.fit.predicted(bounds)
                profile = self._run.corrections.applied(base, bounds)
                try:
                    policy, may_improve = self.fit.fitting(profile, policies)
                    break
                except InfeasibleBudgetError as error:
                    infeasible = error
            else:
                policy, may_improve = self.fit.least(profile, bounds, infeasible), False
        record = self._record(bounds, base, profile, policy)
        record.num_waiting = int(may_improve)
        record.must_measure |= self.fit.is_larger(bounds)
        self._run.note("policy", reason=f"for batches of {describe(bounds)}", **predictions(policy))
        return record

    def _record(self, shapes: Shapes | None, base: Profile, profile: Profile, policy: Policy) -> SizePolicy:
        plans = self._handle.prepare(policy, self._handle.plans)
        # Measure the memory of a step as soon as possible, and then only after changes.
        must_measure = all(other.must_measure for other in self.records.values())
        record = SizePolicy(shapes, base, profile, policy, plans, self._run.corrections.version, must_measure)
        if shapes is None:
            self.records.clear()
        put_latest(self.records, shapes, record, MAX_SIZES)
        self.has_changed = True
        return record

    def add(self, measured: Profile, policy: Policy | None = None) -> SizePolicy:
        """Add a record for the profile `measured`, under `policy`, a solved one, or that with the least memory."""
        corrections = self._run.corrections
        base = self.fit.add(with_static_memory(measured, -corrections.static_bytes))  # it counts what was added since
        shapes = base.measured[0][0] or None
        profile = corrections.applied(base, shapes)
        if policy is None:
            with reported_if_slow("solving for a policy of the new profile"):
                try:
                    policy = self.fit.solved(profile, corrections.memory_budget)
                except InfeasibleBudgetError as error:
                    policy = self.fit.least(profile, shapes or (), error)
        record = self._record(shapes, base, profile, policy)
        self.num_profiles += 1
        self._put(record)
        self._sizes = []  # the sizes may be those of another rank
        return record

    # Replacement of policies.

    def refresh(self, record: SizePolicy) -> None:
        """Apply the run's corrections to the profile of `record`. If its policy then exceeds the budget, or uses a
        codec that is not allowed any more, solve at once, else when it pays. If nothing fits, use the least memory."""
        corrections, run = self._run.corrections, self._run
        if record.version == corrections.version:
            return
        record.version = corrections.version
        record.profile = corrections.applied(record.base, record.shapes)
        budget, is_new = run.budget(record.profile), True
        with reported_if_slow(f"step {run.current_step}: solving for a policy, because {corrections.reason}"):
            try:
                policy, is_new = self.fit.fastest(record.profile, [record.policy], budget, is_final=False)
            except InfeasibleBudgetError as error:
                policy = error.least or record.policy
                text = "no policy fits the budget any more, training continues with the least memory"
                run.warn_of_memory(f"step {run.current_step}: {corrections.reason}; {text}: {error}")
        record.num_waiting = 0 if is_new or uses_up(policy, budget) else max(record.num_waiting, 1)
        if len(distinct([record.policy, policy])) > 1:
            record.must_measure |= is_new  # else outlier channels have changed
            run.note("change", reason=corrections.reason, **predictions(policy))
            self._follow(record, policy)
            if is_new:
                costs = describe_costs(policy, record.profile)
                announce("Adacc: policy changed at step %d (%s): %s", run.current_step, corrections.reason, costs)
        elif record is self.current:
            self._put(record)

    def _solve_if_it_pays(self, record: SizePolicy) -> None:
        """Count a batch under a policy that a solver run may improve. Once the overhead of these batches has reached
        SOLVER_MS, solve, and follow the new policy if it is faster."""
        if not record.num_waiting or record.must_measure:
            return
        record.num_waiting += 1
        num_batches = record.num_waiting - 1
        if (num_batches - 1) * record.policy.predicted_overhead_ms <= SOLVER_MS:
            return
        record.num_waiting = 0
        sizes = describe(record.shapes or ())
        with reported_if_slow(f"solving for batches of {sizes}"):
            try:
                policy = self.fit.solved(record.profile, self.fit.with_room(record.profile))
            except InfeasibleBudgetError:
                return
        if policy.predicted_overhead_ms < current_policy(record.profile, record.policy).predicted_overhead_ms:
            record.must_measure = record.measured_peak_bytes is not None or self.fit.is_larger(record.shapes)
            reason = f"for batches of {sizes}, which have come {num_batches} times"
            self._run.note("policy", reason=reason, **predictions(policy))
            self._follow(record, policy)

    def _follow(self, record: SizePolicy, policy: Policy) -> None:
        """Replace the policy of `record` from the next micro-batch on."""
        record.policy, record.plans = policy, self._handle.prepare(policy, record.plans)
        self.has_changed = True
        if record is self.current:
            self._put(record)

    def _put(self, record: SizePolicy | None) -> None:
        self._handle.follow(None if record is None else record.plans)
        self.current = record
        if record is not None:
            self._run.policy, self._run.profile = record.policy, record.profile

    def suspend(self) -> None:
        """Run the blocks of the current micro-batch under torch's checkpoint, because it is to be recorded."""
        self.used.discard(self.current)
        self._put(None)
        self.used.add(None)

    # Micro-batches that did not follow a policy.

    def end_micro_batch(self, fallbacks: Mapping[str, Counter[str]]) -> None:
        """Count the finished micro-batch. `fallbacks` are its calls of blocks that did not follow their plans, by
        reason and block."""
        self._num_batches += 1
        record = self.current
        if record is None:
            self._run.fallbacks[NO_POLICY] += 1
        elif fallbacks:
            self._num_diverged += 2 * sum(blocks.total() for blocks in fallbacks.values()) > len(record.policy.blocks)
            budget = self._run.budget(record.profile)
            if budget.limits_peak and OTHER_OPERATORS in fallbacks:
                self._run.warn_of_memory(
                    f"a batch of {describe(self.shapes)} ran other operators than the profiled ones, and may take more "
                    f"than memory_budget={budget.setting!r} allows: to avoid this, set dataloader_drop_last=True, or "
                    f"pad all batches to one length",
                    key=OTHER_OPERATORS,
                )

    def most_diverged(self) -> bool:
        """Return True if, in most micro-batches since the last call of this method, most block calls did not follow
        their plans: they ran under torch's checkpoint, or with operators that were not profiled."""
        is_majority = 2 * self._num_diverged > self._num_batches
        self._num_batches = self._num_diverged = 0
        return is_majority
