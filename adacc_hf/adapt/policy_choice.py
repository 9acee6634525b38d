"""PolicyChoice: the choice of a policy for each micro-batch, which depends on the sizes of the micro-batch's tensors.

NOTE [Choice of a policy]. Sizes are grouped into classes, each 25 % larger than the class below
(artifacts/size_model.py). A class has one record, a `SizePolicy`. A micro-batch gets its policy here and nowhere else,
and policies are replaced here and nowhere else, at once, by the rank that needs it.
| micro-batch | policy |
|---|---|
| in a class with a record | the record's, solved again if the run's corrections put it above the budget |
| in a new class | the fastest policy of the run, or full recomputation, that fits; a solver run follows when it pays |
| in a new class, if none of these fits | solved for the class, or, if none fits the class, for the batch's own sizes |
| in no class | that of the smallest recorded sizes around it, else torch's checkpoint, and it may be recorded |
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from adacc_hf.adapt.corrections import with_static_memory
from adacc_hf.adapt.events import PolicyChanged, PolicySet, predictions
from adacc_hf.adapt.fallback_stats import NO_POLICY, describe_costs, full_recomputation, ratio
from adacc_hf.adapt.policy_checks import ALL_BLOCKS, SAME_SIZE, refuse_uncovered
from adacc_hf.adapt.policy_fit import NOTHING_FITS, PolicyFit, current_policy, distinct
from adacc_hf.adapt.run_state import RunState
from adacc_hf.adapt.size_policy import RECORDED_STEPS, SizePolicy
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.run.entries import OTHER_OPERATORS
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import batch_shapes, describe, fits_in, num_elements
from adacc_hf.torch_glue.memory import batch_bytes
from adacc_hf.torch_glue.progress import announce, reported_if_slow

log = logging.getLogger(__name__)

MAX_SIZES = 64
"""Number of size classes that a run remembers. The least recently used one is dropped."""
FEW_PROFILES, MOST_PROFILES = 6, 16
"""Number of profiles up to which each size that no profile predicts is recorded, because profiles of a few sizes
predict all others, and the number up to which sizes are recorded that do not fit in a recorded one."""


class PolicyChoice:
    """Policies of a run by batch size, the active policy, and the sizes of the current step's micro-batches."""

    def __init__(self, handle: PolicyHandle, run: RunState) -> None:
        self.records: OrderedDict[Shapes | None, SizePolicy] = OrderedDict()
        """Record of each size class, the least recently used first."""
        self.fit = PolicyFit(run, lambda: distinct(record.policy for record in self.records.values()))
        self.current: SizePolicy | None = None
        """Record that the blocks follow now. None under torch's checkpoint."""
        self.shapes: Shapes = ()
        """Sizes of the most recent micro-batch."""
        self.nbytes = 0
        """Bytes of the tensors in the most recent micro-batch."""
        self._has_shapes = False
        """False from the begin of a micro-batch until its tensors are known."""
        self._sizes: list[tuple[str, torch.Size]] = []
        self.largest: Shapes = ()
        """Sizes of the largest micro-batch of the step."""
        self.batch_bytes = 0
        """Bytes of the largest micro-batch of the step."""
        self.has_changed = False
        """True if a policy was set or replaced in the current step."""
        self.is_provisional = False
        """True if the budget limits the peak, until the memory of a first step has been measured."""
        self.must_measure = False
        """True if the memory of a step is to be measured as soon as possible, once after each change of a policy."""
        self._num_batches = self._num_diverged = 0
        """Numbers of micro-batches since the last call of `most_diverged`: of all, and of those in which most block
        calls did not follow their plan."""
        self._run = run
        self._handle = handle
        self._used: dict[int, SizePolicy | None] = {}
        """Records of the step's micro-batches by `id`. None stands for torch's checkpoint."""
        self._lasts = False
        """True if the record also applies to the next micro-batch, if this has the same shapes."""
        self.is_unpredicted = False
        """True if no profile predicts the micro-batch's sizes, and they may be recorded."""
        self.num_profiles = 0

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
        self._used.clear()
        self.largest, self.batch_bytes, self.has_changed = (), 0, False

    def begin_micro_batch(self) -> None:
        """Begin the next micro-batch, whose sizes are not known yet."""
        self._has_shapes = False

    def read(self, inputs: Any) -> None:
        """Apply the policy for a micro-batch with the tensors of the mapping `inputs`. Do nothing if the sizes of the
        micro-batch are known already, or if `inputs` is not a mapping.

        In reinforcement learning, the tensors are sampled within the step, so they do not always exist when the
        micro-batch begins.
        """
        if self._has_shapes or not isinstance(inputs, Mapping):
            return
        self._has_shapes = True
        sizes = [(name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        shapes = self.shapes
        if sizes != self._sizes:  # skipped for equal sizes: `batch_shapes` takes time
            self._sizes, shapes, self.nbytes = sizes, batch_shapes(inputs), batch_bytes(inputs)
        self.choose(shapes, self.nbytes)

    def choose(self, shapes: Shapes, nbytes: int) -> None:
        """Apply the policy for a micro-batch of `shapes`. `nbytes` is the total size of the micro-batch's tensors."""
        self.batch_bytes = max(self.batch_bytes, nbytes)
        current = self.current
        is_stale = current is None or current.version != self._run.corrections.version
        if is_stale or not self._lasts or shapes != self.shapes:
            self._choose(shapes)
        self._used[id(self.current)] = self.current
        if shapes != self.largest and num_elements(shapes) > num_elements(self.largest):
            self.largest = shapes

    def _choose(self, shapes: Shapes) -> None:
        self.shapes, self.is_unpredicted = shapes, False
        sizes = self.fit.class_of(shapes)
        record = self._around(shapes) if sizes is None else self._of_class(sizes, shapes)
        if record is not None:
            self.records.move_to_end(record.shapes)
            self.refresh(record)
            self._solve_if_it_pays(record)
        if record is not self.current:
            self._put(record)
        if record is None:
            reason = f"no profile predicts batches of {describe(shapes)}"
            refuse_uncovered(self._run.config, ALL_BLOCKS, reason, SAME_SIZE)
        if record is not None or not self.is_unpredicted:  # a batch that is recorded gets a policy right away
            self._run.warnings.before(shapes, record, self.shown, self._run.budget(self.shown.profile))
        self._lasts = record is not None and not record.num_waiting and not self.is_unpredicted

    def _around(self, shapes: Shapes) -> SizePolicy | None:
        """Return the record of the smallest sizes in which a batch of `shapes`, which belongs to no class, fits."""
        if None in self.records:
            return self.records[None]
        best = self.records.get(_smallest_around(shapes, self.records) or ())
        limit = MOST_PROFILES if best is None else FEW_PROFILES
        self.is_unpredicted = (best is None or best.shapes != shapes) and self.num_profiles < limit
        return best

    def _of_class(self, sizes: Shapes, shapes: Shapes) -> SizePolicy:
        """Return the record of a batch of `shapes`, whose class is `sizes`. Make one if the class is new."""
        record = self.records.get(sizes) or self.records.get(shapes)
        if record is None and self.fit.is_above_budget(sizes):
            within = [other for other in self.records if other is not None and fits_in(other, sizes)]
            record = self.records.get(_smallest_around(shapes, within) or ())
        return record or self._new(sizes, shapes)

    def _new(self, sizes: Shapes, shapes: Shapes) -> SizePolicy:
        """Make the record of the class `sizes`, or of the batch's own sizes, if no policy fits the class's bounds."""
        with reported_if_slow(f"solving for batches of {describe(sizes)}"):
            fitting = self.fit.for_class(sizes)
            if fitting is None:
                names = dict(sizes)
                sizes = tuple((name, size) for name, size in shapes if name in names)
                fitting = self.fit.for_sizes(sizes)
        policy, may_improve = fitting
        record = self._record(sizes, self.fit.predicted(sizes), policy)
        record.num_waiting, record.num_steps = int(may_improve), RECORDED_STEPS
        self._measure_if_larger(record)
        self._note_set(f"for batches of {describe(sizes)}", policy)
        return record

    def _measure_if_larger(self, record: SizePolicy) -> None:
        """Request a measurement of a step's memory if batches of this size are larger than every recorded batch."""
        record.must_measure = self.fit.is_larger(record.shapes)
        self.must_measure |= record.must_measure

    def _record(self, shapes: Shapes | None, base: Profile, policy: Policy) -> SizePolicy:
        corrections = self._run.corrections
        profile = corrections.applied(base, shapes)
        plans = self._handle.prepare(policy, self._handle.plans)
        record = SizePolicy(shapes, base, profile, policy, plans, corrections.version)
        if shapes is None:
            self.records.clear()
        put_latest(self.records, shapes, record, MAX_SIZES)
        self._lasts, self.has_changed = False, True
        return record

    def add(self, measured: Profile, policy: Policy | None = None) -> SizePolicy:
        """Add a record for the sizes of the profile `measured`, and follow it. Without a `policy`, one is solved: if
        none fits the budget, that with the least memory."""
        corrections = self._run.corrections
        base = self.fit.add(with_static_memory(measured, -corrections.static_bytes))  # it counts what was added since
        shapes = base.measured[0][0] or None
        if policy is None:
            with reported_if_slow("solving for a policy of the new profile"):
                try:
                    policy = self.fit.solved(corrections.applied(base, shapes), corrections.memory_budget)
                except InfeasibleBudgetError as error:
                    policy = self.fit.least_of(shapes or (), error)
        record = self._record(shapes, base, policy)
        self.num_profiles += 1
        self._put(record)
        return record

    def clear(self) -> None:
        """Remove all policies, because the model now trains other blocks, or its blocks run other operators."""
        self.records.clear()
        self.fit.clear()

    # Replacement of policies.

    def refresh(self, record: SizePolicy, must_fit: bool = False) -> None:
        """Apply the run's corrections to the profile of `record`. If its policy then exceeds the budget, or uses a
        codec that is not allowed any more, solve at once. If it leaves much memory unused, solve when that pays.

        If no policy fits, follow the one that needs the least memory, or raise InfeasibleBudgetError if `must_fit`.
        """
        corrections, run = self._run.corrections, self._run
        if record.version == corrections.version:
            return
        record.version = corrections.version
        record.profile = corrections.applied(record.base, record.shapes)
        started = time.perf_counter()
        with reported_if_slow(f"step {run.current_step}: solving for a policy, because {corrections.reason}"):
            policy, reason, may_improve = self.fit.adapted(record.profile, record.policy, must_fit)
        waited_ms = (time.perf_counter() - started) * 1e3
        record.num_waiting, self._lasts = max(record.num_waiting, 1) if may_improve else 0, False
        if NOTHING_FITS in reason:
            log.warning("Adacc: step %d: %s", run.current_step, reason)
            run.warnings.add(record.shapes)
            run.note_memory(reason)
        if len(distinct([record.policy, policy])) > 1:
            self._change(record, policy, f"{corrections.reason}: {reason}", waited_ms)

    def _solve_if_it_pays(self, record: SizePolicy) -> None:
        """Count a batch under a policy that a solver run may improve. Once the overhead of these batches has reached
        the time of a solver run, solve, and follow the new policy if it is faster."""
        if not record.num_waiting or self.is_provisional:
            return
        record.num_waiting += 1
        num_batches = record.num_waiting - 1
        if (num_batches - 1) * record.policy.predicted_overhead_ms <= self.solver_ms:
            return
        record.num_waiting = 0
        sizes = describe(record.shapes or ())
        with reported_if_slow(f"solving for batches of {sizes}"):
            try:
                policy = self.fit.solved(record.profile, self.fit.with_room(record.profile))
            except InfeasibleBudgetError:
                return
        if policy.predicted_overhead_ms < current_policy(record.profile, record.policy).predicted_overhead_ms:
            self._measure_if_larger(record)
            self._note_set(f"for batches of {sizes}, which have come {num_batches} times", policy)
            self._follow(record, policy)

    @property
    def solver_ms(self) -> float:
        """Time in ms of the latest solver run for a size, or, before, of that for the run's first policy."""
        if self.fit.solver_ms is not None:
            return self.fit.solver_ms
        return 1e3 * max(float(dict(record.policy.facts).get("seconds", 0.0)) for record in self.records.values())

    def tighten(self, memory_budget: float | int) -> Policy:
        """Solve for `memory_budget`, which is smaller than before, and follow the new policy from now on.

        Other sizes follow when they come. Raises InfeasibleBudgetError if no policy fits. The old one then remains.
        """
        record, corrections = self.current, self._run.corrections
        assert record is not None
        policy = self.fit.solved(record.profile, memory_budget)
        corrections.tightened = memory_budget
        corrections.changed("memory ran out")
        record.version = corrections.version
        self._follow(record, policy)
        return policy

    def _change(self, record: SizePolicy, policy: Policy, reason: str, waited_ms: float) -> None:
        """Replace the policy of `record`, and append the change to the history. Training has waited `waited_ms`."""
        before, run = record.policy, self._run
        extra_ms = (policy.predicted_overhead_ms - before.predicted_overhead_ms) * self._run.loop.num_micro
        step_ms = record.times.median_ms
        record.predicted_step_ms = None if step_ms is None else step_ms + extra_ms
        num_actions, num_channels = num_changes(before, policy)
        if num_actions:
            record.must_measure = self.must_measure = True
        run.note(
            PolicyChanged(
                step=run.current_step,
                reason=reason,
                moved=f"{num_actions} actions, {num_channels} sets of channels",
                waited_ms=waited_ms,
                step_ms=step_ms,
                predicted_step_ms=record.predicted_step_ms,
                **predictions(policy),
            )
        )
        self._follow(record, policy)
        if num_actions:
            costs = describe_costs(policy, record.profile)
            announce("Adacc: policy changed at step %d (%s): %s", run.current_step, reason, costs)

    def _follow(self, record: SizePolicy, policy: Policy) -> None:
        """Replace the policy of `record` from the next micro-batch on, and drop the times of its steps."""
        record.policy, record.plans = policy, self._handle.prepare(policy, record.plans)
        record.times.start_over()
        record.is_fresh = self.has_changed = True
        if record is self.current:
            self._put(record)

    def _note_set(self, reason: str, policy: Policy) -> None:
        self._run.note(PolicySet(step=self._run.current_step, reason=reason, **predictions(policy)))

    def _put(self, record: SizePolicy | None) -> None:
        self._handle.follow(None if record is None else record.plans)
        self.current, self._lasts = record, False

    def suspend(self) -> None:
        """Run the blocks of the current micro-batch under torch's checkpoint, because it is to be recorded."""
        self._used.pop(id(self.current), None)
        self._put(None)
        self._used[id(None)] = None

    # What the step's micro-batches used.

    def used(self) -> list[SizePolicy | None]:
        """Return the records under which the step's micro-batches ran. None stands for torch's checkpoint."""
        return list(self._used.values()) or [self.current]

    def ran_alone(self) -> bool:
        """Return True if all micro-batches of the step ran under the active policy."""
        return self.current is not None and all(record is self.current for record in self._used.values())

    def end_micro_batch(self, fallbacks: Mapping[str, int]) -> tuple[float, dict[str, int]]:
        """Return the predicted overhead in ms of the finished micro-batch, and its number of fallbacks by reason.

        `fallbacks` contains the number of calls of blocks that did not follow their plans, by reason.
        """
        self._num_batches += 1
        if self.current is None:
            return self._fallback_ms(), {NO_POLICY: 1}
        policy = self.current.policy
        planned_ms = policy.predicted_overhead_ms * ratio(self.shapes, self.current.shapes)
        if not fallbacks:
            return planned_ms, {}
        share = min(1.0, sum(fallbacks.values()) / len(policy.blocks))
        self._num_diverged += share > 0.5
        budget = self._run.budget(self.current.profile)
        self._run.warnings.after(self.shapes, self.current, budget, OTHER_OPERATORS in fallbacks)
        return (1 - share) * planned_ms + share * self._fallback_ms(), dict(fallbacks)

    def _fallback_ms(self) -> float:
        """Return the overhead that the most recent micro-batch would have under full recomputation."""
        return full_recomputation(self.shown.profile).predicted_overhead_ms * ratio(self.shapes, self.shown.shapes)

    def most_diverged(self) -> bool:
        """Return True if, in most micro-batches since the last call of this method, most block calls ran under torch's
        checkpoint, or operators that were not profiled, instead of their plans."""
        is_majority = 2 * self._num_diverged > self._num_batches
        self._num_batches = self._num_diverged = 0
        return is_majority


def _smallest_around(shapes: Shapes, candidates: Iterable[Shapes | None]) -> Shapes | None:
    """Return the smallest of `candidates` in which a batch of `shapes` fits, or None."""
    fitting = (sizes for sizes in candidates if sizes is not None and fits_in(shapes, sizes))
    return min(fitting, key=num_elements, default=None)


def num_changes(before: Policy, after: Policy) -> tuple[int, int]:
    """Count the activations of all blocks that a change of policy affects. Return (num_actions, num_channels).

    `num_actions` counts the activations whose action or codec changed. `num_channels` counts the activations with the
    same codec but other codec options, which in practice are other outlier channels.
    """
    num_actions = num_channels = 0
    for block, _ in before.blocks:
        old = dict(before.plan_of(block).choices)
        for value, choice in after.plan_of(block).choices:
            earlier = old.get(value, choice)
            is_other = (earlier.action, earlier.codec) != (choice.action, choice.codec)
            num_actions += is_other
            num_channels += not is_other and earlier.options != choice.options
    return num_actions, num_channels
