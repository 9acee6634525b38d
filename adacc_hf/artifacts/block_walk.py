"""What one block keeps and needs under a plan by activation, moment by moment, in whole bytes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from adacc_hf.artifacts.policy import Action

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Plan
    from adacc_hf.artifacts.profile import CodecOption, KindProfile, Operator


DECODED_KEPT = 4
"""Unpacks within which a decoded value is wanted again for the executor to keep it. One operator's slots are next to
each other and its neighbour's follow; a mask that a replay reads at the start of backward and autograd at its end is
decoded twice instead of taking 32 times its payload for all that time."""


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


@dataclass(frozen=True)
class _Moment:
    """One thing that happens in backward: an operator runs, or autograd asks for a slot or lets go of it."""

    entry_bytes: int
    extra_bytes: int
    operator: Operator | None = None
    unpacked: int | None = None
    released: int | None = None


class BlockWalk:
    """The walk through one block's backward: first what happens in which order, then what is live when.

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

    def __init__(self, kind: KindProfile, plan: Plan, held: Collection[int] = ()) -> None:
        """`held` are block inputs that somebody holds until the block's backward ends."""
        self.held = frozenset(held)
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
        self.roots = {
            v: nbytes for v, nbytes in self.roots.items() if kind.values[v].saved or v in read or v in self.held
        }

    def _is_chosen_to_store(self, value: int) -> bool:
        return value in self.choices and self._kept(value)

    def _kept(self, value: int) -> bool:
        return self.choices[value].action is not Action.RECOMPUTE

    def _is_coded(self, value: int) -> bool:
        return value in self.choices and self.choices[value].action is Action.COMPRESS and value in self.roots

    def _option(self, value: int) -> CodecOption:
        return self.kind.codec_option(value, self.choices[value])

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
        root_death |= dict.fromkeys(self.held, math.inf)
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
