"""What a policy costs and keeps, by replaying it step by step as the executor would, in whole bytes.

It checks the solver and shares no code with it: the solver optimises totals, the simulator walks through one training
step moment by moment. See `run_block` for the rules of one block's backward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from adacc_hf.artifacts.policy import Action

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Plan, Policy
    from adacc_hf.artifacts.profile import KindProfile, Operator, Profile


DECODED_KEPT = 4
"""Unpacks within which a decoded value is wanted again for the executor to keep it. One operator's slots are next to
each other and its neighbour's follow; a mask that a replay reads at the start of backward and autograd at its end is
decoded twice instead of taking 32 times its payload for all that time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training step under a policy keeps, needs and costs."""

    stored_bytes: int
    """Bytes that forward leaves behind for backward, the outside of the blocks and shared tensors included."""
    peak_bytes: int
    """Most bytes live at any moment of the step."""
    overhead_ms: float
    """Time spent on replay, encoding and decoding, over all blocks (the paper's equation 4), and by the head beyond the
    plain one: below 0 where a faster head saves more than the blocks cost."""
    timeline: tuple[tuple[str, int], ...]
    """Moments of the step in order: what runs, and the bytes live then."""

    @cached_property
    def peak_label(self) -> str:
        """What runs when the peak is reached first."""
        return max(self.timeline, key=lambda point: point[1])[0]


@dataclass(frozen=True, kw_only=True)
class BlockOutcome:
    """One block under one plan, the same for every block that has both."""

    stored_bytes: int
    """Bytes that its forward leaves behind, shared tensors left out."""
    shared: frozenset[int]
    """Shared tensors that its replay reads."""
    overhead_ms: float
    forward_moments: tuple[int, ...]
    """Bytes live at each moment of its forward besides `BlockProfile.forward_base_bytes` and earlier blocks'
    stores."""
    moments: tuple[int, ...]
    """Bytes live at each moment of its backward, besides `BlockProfile.backward_base_bytes` and what earlier blocks
    stored."""
    live_bytes: int
    """What of `stored_bytes` forward does not hold anyway until the whole forward ends."""

    @cached_property
    def forward_working_bytes(self) -> int:
        """Most bytes live in its forward."""
        return max(self.forward_moments, default=0)

    @cached_property
    def working_bytes(self) -> int:
        """Most bytes live in its backward; 0 if autograd asks for nothing."""
        return max(self.moments, default=0)


def simulate(profile: Profile, plans: Sequence[Plan]) -> Outcome:
    """The outcome of a training step in which the i-th block of `profile` runs under `plans[i]`.

    Raises ValueError for a plan that cannot be carried out.
    """
    outcomes: dict[tuple[int, Plan], BlockOutcome] = {}
    for block, plan in zip(profile.blocks, plans, strict=True):
        if (block.kind, plan) not in outcomes:
            outcomes[block.kind, plan] = run_block(profile.kind_of(block), plan)
    return simulate_blocks(profile, [outcomes[b.kind, plan] for b, plan in zip(profile.blocks, plans, strict=True)])


def simulate_policy(profile: Profile, policy: Policy) -> Outcome:
    """The outcome of a training step of `profile` under `policy`, with the head that it chose. Raises as `simulate`."""
    return simulate(profile.with_head(policy.head), [policy.plan_of(block.name) for block in profile.blocks])


def simulate_blocks(profile: Profile, blocks: Sequence[BlockOutcome]) -> Outcome:
    """The outcome of a training step in which the i-th block of `profile` has the outcome `blocks[i]`."""
    timeline = _timeline(profile, blocks)
    read = frozenset().union(*(block.shared for block in blocks))
    shared_bytes = sum(shared.nbytes for i, shared in enumerate(profile.shared) if shared.saved or i in read)
    return Outcome(
        stored_bytes=sum(block.stored_bytes for block in blocks) + shared_bytes + profile.outside_stored_bytes,
        peak_bytes=max(live for _, live in timeline),
        overhead_ms=sum(block.overhead_ms for block in blocks) + profile.head_overhead_ms,
        timeline=tuple(timeline),
    )


class EarlierBlocks(NamedTuple):
    """What the blocks of a step up to one leave behind."""

    stored_bytes: int = 0
    live_bytes: int = 0
    """What of it forward does not hold anyway."""
    shared: frozenset[int] = frozenset()
    """Shared tensors that their replay reads."""

    def then(self, outcome: BlockOutcome) -> EarlierBlocks:
        """The same after one more block."""
        return EarlierBlocks(
            self.stored_bytes + outcome.stored_bytes,
            self.live_bytes + outcome.live_bytes,
            self.shared | outcome.shared,
        )

    def bases(self, profile: Profile, index: int, outcome: BlockOutcome) -> tuple[int, int]:
        """Bytes live besides the block's own in the forward and in the backward of the `index`-th, the next one."""
        block = profile.blocks[index]
        unread = profile.unread_bytes(index, self.shared | outcome.shared)
        return block.forward_base_bytes + self.live_bytes, block.backward_base_bytes - unread + self.stored_bytes

    def block_peak(self, profile: Profile, index: int, outcome: BlockOutcome) -> int:
        """Peak in the forward and the backward of the `index`-th block."""
        forward, backward = self.bases(profile, index, outcome)
        peak = forward + outcome.forward_working_bytes
        return max(peak, backward + outcome.working_bytes) if outcome.moments else peak

    def head_peaks(self, profile: Profile) -> tuple[int, int]:
        """Peaks in the forward and the backward of the head and the loss, after all blocks."""
        outside, loss = profile.head_peaks(self.shared)
        return outside + self.live_bytes, loss + self.stored_bytes


def step_peak_bytes(profile: Profile, outcomes: Sequence[BlockOutcome]) -> int:
    """Peak of a step in which the i-th block has `outcomes[i]`: `simulate(...).peak_bytes` without the timeline."""
    peaks = [profile.tail_peak_bytes, profile.optimizer_peak_bytes]
    earlier = EarlierBlocks()
    for index, outcome in enumerate(outcomes):
        peaks.append(earlier.block_peak(profile, index, outcome))
        earlier = earlier.then(outcome)
    return max(*peaks, *earlier.head_peaks(profile))


def _timeline(profile: Profile, outcomes: Sequence[BlockOutcome]) -> list[tuple[str, int]]:
    """Forward, head and loss, backward from the last block to the first, what follows it, and the optimizer."""
    earlier = EarlierBlocks()
    points: list[tuple[str, int]] = []
    backward: list[list[tuple[str, int]]] = []
    for index, (block, outcome) in enumerate(zip(profile.blocks, outcomes, strict=True)):
        forward_base, backward_base = earlier.bases(profile, index, outcome)
        points += [(f"forward {block.name}", forward_base + live) for live in outcome.forward_moments]
        backward.append([(f"backward {block.name}", backward_base + live) for live in outcome.moments])
        earlier = earlier.then(outcome)
    points += zip(("head and loss", "backward of head and loss"), earlier.head_peaks(profile), strict=True)
    for moments in reversed(backward):
        points += moments
    points.append(("before or after the blocks", profile.tail_peak_bytes))
    if profile.optimizer_peak_bytes:
        points.append(("optimizer", profile.optimizer_peak_bytes))
    return points


def run_block(kind: KindProfile, plan: Plan) -> BlockOutcome:
    """The outcome of one block of `kind` under `plan`.

    - Roots, the tensors and payloads that forward stored, are live from the start; each dies when the last slot that
      needs it is released. A slot that is never released lives until the block's end.
    - An operator is replayed at most once, at the first unpack that needs it, in order. All its outputs are allocated;
      one that is a root as well, or that nothing reads, dies at once.
    - A payload is decoded just before its use, and again if it is wanted much later.
    - A replayed or decoded value dies after its last use, and not before autograd released every slot it was handed to.
    - What a replay reads is copied for an autograd Function written in Python, whose backward may write into it, unless
      nothing holds it once it was handed over. The copy dies when autograd releases the slot.
    - A recomputed value that repeats an earlier activation is that activation.
    - A replayed operator that draws random numbers takes a generator's state that forward stored.

    Raises ValueError for a plan that cannot be carried out.
    """
    return _BlockWalk(kind, plan).outcome()


@dataclass(frozen=True)
class _Moment:
    """One thing that happens in backward: an operator runs, or autograd asks for a slot or lets go of it."""

    entry_bytes: int
    extra_bytes: int
    operator: Operator | None = None
    unpacked: int | None = None
    released: int | None = None


class _BlockWalk:
    """The walk through one block's backward: first what happens in which order, then what is live when."""

    def __init__(self, kind: KindProfile, plan: Plan) -> None:
        self.choices = dict(plan.choices)
        self._twins: frozenset[int] = frozenset()
        """Values that others are taken from."""
        if any(choice.action is Action.RECOMPUTE for choice in self.choices.values()):
            twins = {v: twin for v, twin in kind.equal.items() if not self._is_chosen_to_store(v)}
            kind = kind.merged(twins)
            self._twins = frozenset(twins.values())
        self.kind = kind
        # Whatever a policy wants kept; block inputs and generator's states that nobody turns out to need are dropped
        # below.
        self.roots = {
            value.index: self._root_bytes(value.index) for value in kind.activations if self._kept(value.index)
        }
        self.roots |= {value.index: value.nbytes for value in kind.values if value.is_generator_state}
        self.shared: set[int] = set()
        self.closures = {slot: self._closure(value) for slot, value in enumerate(kind.slots) if value >= 0}
        read = set().union(*(roots for roots, _ in self.closures.values()))
        self.roots = {v: nbytes for v, nbytes in self.roots.items() if kind.values[v].saved or v in read}

    def _is_chosen_to_store(self, value: int) -> bool:
        return value in self.choices and self._kept(value)

    def _kept(self, value: int) -> bool:
        return self.choices[value].action is not Action.RECOMPUTE

    def _is_coded(self, value: int) -> bool:
        return value in self.choices and self.choices[value].action is Action.COMPRESS and value in self.roots

    def _option(self, value: int):
        choice = self.choices[value]
        for option in self.kind.values[value].codecs:
            if (option.codec, option.options) == (choice.codec, choice.options):
                return option
        raise ValueError(
            f"activation {value} ({self.kind.values[value].name}) has no price for codec {choice.codec!r} with "
            f"{dict(choice.options)}: profile again with that codec"
        )

    def _root_bytes(self, value: int) -> int:
        if self.choices[value].action is Action.COMPRESS:
            return self._option(value).nbytes
        return self.kind.values[value].nbytes

    def _closure(self, value: int) -> tuple[frozenset[int], frozenset[int]]:
        """The roots that making `value` from what is stored reads, and the operators it runs."""
        roots: set[int] = set()
        operators: set[int] = set()
        pending = [value]
        while pending:
            index = pending.pop()
            value_record = self.kind.values[index]
            if value_record.shared is not None:
                if operators:
                    self.shared.add(value_record.shared)
            elif index in self.roots:
                roots.add(index)
            else:
                operator = self._producer(index)
                if operator.index not in operators:
                    operators.add(operator.index)
                    pending += operator.inputs
        return frozenset(roots), frozenset(operators)

    def _producer(self, index: int) -> Operator:
        value = self.kind.values[index]
        if value.producer is None or not value.recomputable or not self.kind.operators[value.producer].replayable:
            raise ValueError(
                f"the plan does not store value {index} ({value.name}) of {self.kind.block_class}, which replay cannot "
                f"make: retain or compress it"
            )
        return self.kind.operators[value.producer]

    def _steps(self) -> list[_Moment]:
        """Everything that happens in backward, in order."""
        steps: list[_Moment] = []
        done: set[int] = set()
        for event in self.kind.backward:
            sizes = (event.entry_bytes, event.extra_bytes)
            if event.release:
                steps.append(_Moment(*sizes, released=event.slot))
                continue
            _, operators = self.closures.get(event.slot, (frozenset(), frozenset()))
            steps += [_Moment(*sizes, operator=self.kind.operators[j]) for j in sorted(operators - done)]
            done |= operators
            steps.append(_Moment(*sizes, unpacked=event.slot))
        return steps

    def _deaths(self, steps: Sequence[_Moment]) -> tuple[dict[int, float], dict[int, float]]:
        """The step after which each root, and each replayed or decoded value, is dead; infinity for the block's end."""
        released = {step.released: number for number, step in enumerate(steps) if step.released is not None}
        root_death: dict[int, float] = {}
        for slot, (roots, _) in self.closures.items():
            for root in roots:
                root_death[root] = max(root_death.get(root, -1), released.get(slot, math.inf))
        copied = self._copied(steps)
        death: dict[int, float] = {}
        for number, step in enumerate(steps):
            if step.operator is not None:
                death |= dict.fromkeys(step.operator.inputs, number)
        for number, step in enumerate(steps):
            if step.unpacked is not None:
                value = self.kind.slots[step.unpacked]
                end = number if number in copied else released.get(step.unpacked, math.inf)
                death[value] = max(death.get(value, -1), number, end)
        return root_death, death

    def outcome(self) -> BlockOutcome:
        steps = self._steps()
        coded = [self._option(value) for value in self.roots if self._is_coded(value)]
        return BlockOutcome(
            stored_bytes=sum(self.roots.values()),
            shared=frozenset(self.shared),
            overhead_ms=sum(step.operator.ms for step in steps if step.operator is not None)
            + sum(option.encode_ms + option.decode_ms for option in coded),
            live_bytes=sum(n for v, n in self.roots.items() if self._is_coded(v) or not self.kind.values[v].cached),
            forward_moments=tuple(self._forward_moments()),
            moments=tuple(self._moments(steps)),
        )

    def _forward_moments(self) -> list[int]:
        """Live bytes of this block at each moment of its forward.

        A payload is there from when its value is saved; a retained value counts once its readers have let go of it; a
        generator's state from when a slot is filled.
        """
        kept = sum(
            nbytes for value, nbytes in self.roots.items() if self._is_coded(value) and not self._is_saved(value)
        )
        moments = []
        states = self._states_taken()
        for number, event in enumerate(self.kind.forward):
            kept += states.get(number, 0)
            if event.value in self.roots and event.death != self._is_coded(event.value):
                kept += self.roots[event.value]
            moments.append(kept + event.extra_bytes)
        return moments

    def _states_taken(self) -> dict[int, int]:
        """Bytes of the generator's states that are taken at each moment of the forward.

        A slot is filled at the moment when its value is saved first, or at some later one: that counts as the last such
        moment before.
        """
        moments = [(number, event) for number, event in enumerate(self.kind.forward) if event.value >= 0]
        first_saved = {event.value: number for number, event in moments if not event.death}
        filled = [0]
        for value in self.kind.slots:
            filled.append(max(filled[-1], first_saved.get(value, 0)))
        taken: dict[int, int] = {}
        for value in self.roots:
            if self.kind.values[value].is_generator_state:
                moment = filled[self.kind.values[value].taken_after]
                taken[moment] = taken.get(moment, 0) + self.roots[value]
        return taken

    def _is_saved(self, value: int) -> bool:
        return self.kind.values[value].saved

    def _moments(self, steps: Sequence[_Moment]) -> list[int]:
        """Live bytes of this block at each moment of its backward."""
        root_death, death = self._deaths(steps)
        decoded = self._decoded_bytes(steps)
        dying: dict[float, list[int]] = {}
        for root in self.roots:
            dying.setdefault(root_death.get(root, math.inf), []).append(root)
        live = sum(self.roots.values())
        made: dict[float, int] = {}
        moments = []
        for number, step in enumerate(steps):
            during, after = decoded[number]
            if step.operator is not None:
                outputs = {value: self.kind.values[value].nbytes for value in step.operator.outputs}
                copies = 0
                for value, nbytes in outputs.items():
                    if self._is_held(value):
                        copies += nbytes
                        continue
                    live += nbytes
                    end = max(death.get(value, -1), number)
                    made[end] = made.get(end, 0) + nbytes
                moments.append(live + during + copies + step.operator.extra_bytes + step.entry_bytes)
            elif step.unpacked is not None:
                moments.append(live + during + step.entry_bytes)
            live -= made.pop(number, 0) + sum(self.roots[root] for root in dying.get(number, ()))
            if step.operator is None:
                moments.append(live + after + step.extra_bytes)
        return moments

    def _decoded_bytes(self, steps: Sequence[_Moment]) -> list[tuple[int, int]]:
        """Bytes of decoded values and of copies (while a step runs, after it), for each step."""
        uses: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            for value in self._decoded_by(step):
                uses.setdefault(value, []).append(number)
        unpacks = [number for number, step in enumerate(steps) if step.unpacked is not None]
        released = {step.released: number for number, step in enumerate(steps) if step.released is not None}
        spans = [span for value in uses for span in self._decoded_spans(value, uses[value], steps, unpacks, released)]
        for number in self._copied(steps):
            slot = steps[number].unpacked
            assert slot is not None  # that is where copies are made
            nbytes = self.kind.values[self.kind.slots[slot]].nbytes
            spans.append((number, released.get(slot, math.inf), nbytes))
        begins, ends = [0] * len(steps), [0] * len(steps)
        for first, last, nbytes in spans:
            begins[int(first)] += nbytes
            if last < len(steps):
                ends[int(last)] += nbytes
        during = list(accumulate(begin - end for begin, end in zip(begins, [0, *ends], strict=False)))
        return [(live, live - end) for live, end in zip(during, ends, strict=True)]

    def _decoded_spans(
        self,
        value: int,
        uses: Sequence[int],
        steps: Sequence[_Moment],
        unpacks: Sequence[int],
        released: Mapping[int, int],
    ) -> list[tuple[float, float, int]]:
        """(first step, last step, bytes) of each stretch in which a compressed value, used at `uses`, is there decoded.

        It is dropped at the end of an unpack if none of the next DECODED_KEPT unpacks wants it, at once after its last
        use, and in no case before autograd lets go of it.
        """
        ordinals = [bisect_left(unpacks, number) for number in uses]
        spans: list[tuple[float, float, int]] = []
        nbytes = self.kind.values[value].nbytes
        for index, (number, ordinal) in enumerate(zip(uses, ordinals, strict=True)):
            if index == 0 or ordinal - ordinals[index - 1] > DECODED_KEPT:
                spans.append((number, number, nbytes))
            is_last = index == len(uses) - 1
            slot = steps[number].unpacked
            end: float = number if is_last else unpacks[ordinal]
            end = end if slot is None else max(end, released.get(slot, math.inf))
            spans[-1] = (spans[-1][0], max(spans[-1][1], end), nbytes)
        return spans

    def _copied(self, steps: Sequence[_Moment]) -> frozenset[int]:
        """The steps at which a value is copied for a Function's backward."""
        if not self.kind.copied_slots:
            return frozenset()
        run = set().union(*(operators for _, operators in self.closures.values()))
        read = self._twins.union(*(self.kind.operators[index].inputs for index in run))
        unpacks = [number for number, step in enumerate(steps) if step.unpacked is not None]
        uses: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            used = () if step.operator is None else step.operator.inputs
            for value in used if step.unpacked is None else (self.kind.slots[step.unpacked],):
                uses.setdefault(value, []).append(number)
        copied = []
        for ordinal, number in enumerate(unpacks):
            slot = steps[number].unpacked
            value = -1 if slot is None else self.kind.slots[slot]
            if slot not in self.kind.copied_slots or value not in read:
                continue
            later = [use for use in uses[value] if use > number]
            kept_until = unpacks[ordinal + DECODED_KEPT] if ordinal + DECODED_KEPT < len(unpacks) else math.inf
            is_there = self._is_held(value) if not self._is_coded(value) else bool(later) and later[0] <= kept_until
            if is_there or (later and not self._is_coded(value)):
                copied.append(number)
        return frozenset(copied)

    def _is_held(self, value: int) -> bool:
        """Whether readers take `value` from the store, so that replaying it makes a copy that nobody uses."""
        return value in self.roots or self.kind.values[value].shared is not None

    def _decoded_by(self, step: _Moment) -> list[int]:
        """Stored values that must be decoded before `step`, unless they were already."""
        read = step.operator.inputs if step.operator is not None else ()
        if step.unpacked is not None and self.kind.slots[step.unpacked] >= 0:
            read = (self.kind.slots[step.unpacked],)
        return [value for value in read if self._is_coded(value)]
