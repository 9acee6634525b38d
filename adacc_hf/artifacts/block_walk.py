"""Simulation of one block's forward and backward under a plan with one action per activation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from adacc_hf.artifacts.policy import Action

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile, Operator
    from adacc_hf.artifacts.policy import Plan


DECODED_CACHE_UNPACKS = 4
"""Number of unpacks of saved tensors for which the executor caches a decoded value. The tensors saved by one operator
are unpacked one after the other, followed by those of its neighbour, so a few are enough. A mask that is read at the
start and at the end of backward is decoded twice: cached meanwhile, it would take 32 times its payload."""


@dataclass(frozen=True, kw_only=True)
class BlockOutcome:
    """Memory and time of one block under one plan."""

    stored_bytes: int
    """Bytes that the forward stores for backward, without `shared` tensors."""
    shared: frozenset[int]
    """Indices into `Profile.shared` of the tensors that the block's replay reads."""
    overhead_ms: float
    forward_moments: tuple[int, ...]
    """Live bytes at each moment of the forward, without `BlockProfile.forward_base_bytes` and earlier blocks' stored
    bytes."""
    moments: tuple[int, ...]
    """Live bytes at each moment of the backward, without `BlockProfile.backward_base_bytes` and earlier blocks' stored
    bytes."""
    live_bytes: int
    """Part of `stored_bytes` that adds to the live bytes of the model's forward, without parameter casts in autocast's
    cache, which live until the end of the forward anyway."""
    host_bytes: int = 0
    """Bytes that the forward stores in host memory for backward."""

    @cached_property
    def forward_working_bytes(self) -> int:
        """Peak of the forward in bytes."""
        return max(self.forward_moments, default=0)

    @cached_property
    def working_bytes(self) -> int:
        """Peak of the backward in bytes. 0 if autograd unpacks no saved tensor."""
        return max(self.moments, default=0)


class _BackwardEvent(NamedTuple):
    """One event of a backward: an operator is replayed, or autograd unpacks or releases a slot (saved tensor)."""

    entry_bytes: int
    extra_bytes: int
    operator: Operator | None = None
    unpacked: int | None = None
    released: int | None = None


class BlockWalk:
    """A simulation of one block's backward: first the order of events, then the live bytes at each event.

    - Roots (the tensors and payloads that forward stored) are live from the start. A root is freed when the last slot
      that needs the root is released. A slot that is never released lives until the end of the block's backward.
    - An operator is replayed at most once, at the first unpack that needs the operator, in order. All outputs of the
      operator are allocated. An output that is also a root, or that no operator reads, is freed immediately.
    - A payload is decoded just before its use, and decoded again for a much later use.
    - A payload in host memory takes no bytes, except while it is copied: after encoding, and for decoding.
    - A replayed or decoded value is freed after its last use, and not before autograd has released all slots of the
      value.
    - For an autograd Function written in Python, a tensor that a replay reads is copied, because the Function's
      backward may write into the tensor. No copy is made if no other reference remains after the unpack. The copy is
      freed when autograd releases the slot.
    - A recomputed value that repeats an earlier activation reads the earlier activation.
    - A replayed operator that draws random numbers restores a generator's state that forward stored.

    Other references keep the block inputs in `held_inputs` alive until the end of the block's backward. If the plan
    cannot be executed, ValueError is raised.
    """

    def __init__(self, kind: KindProfile, plan: Plan, held_inputs: Collection[int] = ()) -> None:
        self.held_inputs = frozenset(held_inputs)
        self.choices = dict(plan.choices)
        self._twins: frozenset[int] = frozenset()
        """Earlier activations that backward reads in place of later values with the same bits."""
        if any(choice.action is Action.RECOMPUTE for choice in self.choices.values()):
            twins = {v: twin for v, twin in kind.equal.items() if v not in self.choices or not self._is_stored(v)}
            kind = kind.with_merged_values(twins)
            self._twins = frozenset(twins.values())
        self.kind = kind
        # All values that the plan stores. Block inputs and generator's states that nothing needs are dropped below.
        self.roots = {
            value.index: self._root_bytes(value.index) for value in kind.activations if self._is_stored(value.index)
        }
        self.roots |= {value.index: value.nbytes for value in kind.values if value.is_generator_state}
        self.shared: set[int] = set()
        self.closures = {slot: self._closure(value) for slot, value in enumerate(kind.slots) if value >= 0}
        read = set().union(*(roots for roots, _ in self.closures.values()))
        self.roots = {
            v: nbytes for v, nbytes in self.roots.items() if kind.values[v].saved or v in read or v in self.held_inputs
        }
        self.events = self._backward_events()
        self.unpacks = [number for number, event in enumerate(self.events) if event.unpacked is not None]
        self._releases = {event.released: n for n, event in enumerate(self.events) if event.released is not None}
        self.uses: dict[int, list[int]] = {}
        """Indices of the events that read each value: operators that are replayed, and unpacks."""
        for number, event in enumerate(self.events):
            inputs = () if event.operator is None else event.operator.inputs
            for value in inputs if event.unpacked is None else (kind.slots[event.unpacked],):
                self.uses.setdefault(value, []).append(number)
        self.copying_events = self._copying_events()

    def _is_stored(self, value: int) -> bool:
        return self.choices[value].action is not Action.RECOMPUTE

    def _is_compressed(self, value: int) -> bool:
        return value in self.choices and self.choices[value].action is Action.COMPRESS and value in self.roots

    def _option(self, value: int) -> CodecOption:
        return self.kind.codec_option(value, self.choices[value])

    def _root_bytes(self, value: int) -> int:
        if self.choices[value].action is Action.COMPRESS:
            return self._option(value).nbytes
        return self.kind.values[value].nbytes

    def _closure(self, value: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return (stored values to read, operators to run) for a replay of the activation `value`."""
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
        """Return the operator that replays the value. Raises ValueError if the plan cannot be executed."""
        value = self.kind.values[index]
        if value.producer is None or not value.recomputable or not self.kind.operators[value.producer].replayable:
            raise ValueError(
                f"the plan does not store value {index} ({value.name}) of {self.kind.block_class}, and replay cannot "
                f"recompute the value: retain or compress it"
            )
        return self.kind.operators[value.producer]

    def _backward_events(self) -> list[_BackwardEvent]:
        events: list[_BackwardEvent] = []
        replayed: set[int] = set()
        for recorded in self.kind.backward:
            sizes = (recorded.entry_bytes, recorded.extra_bytes)
            if recorded.release:
                events.append(_BackwardEvent(*sizes, released=recorded.slot))
                continue
            _, operators = self.closures.get(recorded.slot, (frozenset(), frozenset()))
            events += [_BackwardEvent(*sizes, operator=self.kind.operators[j]) for j in sorted(operators - replayed)]
            replayed |= operators
            events.append(_BackwardEvent(*sizes, unpacked=recorded.slot))
        return events

    def _release(self, slot: int) -> float:
        """Return the event after which autograd frees a slot (infinity: the end)."""
        return self._releases.get(slot, math.inf)

    def _deaths(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return the event after which each root, and each replayed or decoded value, is freed (infinity: the end)."""
        root_death: dict[int, float] = {}
        for slot, (roots, _) in self.closures.items():
            for root in roots:
                root_death[root] = max(root_death.get(root, -1), self._release(slot))
        root_death |= dict.fromkeys(self.held_inputs, math.inf)
        death: dict[int, float] = {}
        for value, uses in self.uses.items():
            slots = [self.events[number].unpacked for number in uses if number not in self.copying_events]
            death[value] = max(uses[-1], *(self._release(slot) for slot in slots if slot is not None), -1)
        return root_death, death

    def outcome(self) -> BlockOutcome:
        """Return the block's stored bytes, overhead and live bytes at each moment."""
        compressed = [self._option(value) for value in self.roots if self._is_compressed(value)]
        return BlockOutcome(
            stored_bytes=sum(self.roots.values()),
            shared=frozenset(self.shared),
            overhead_ms=self.kind.extra_ms
            + sum(event.operator.ms for event in self.events if event.operator is not None)
            + sum(option.encode_ms + option.decode_ms for option in compressed),
            live_bytes=sum(
                n for v, n in self.roots.items() if self._is_compressed(v) or not self.kind.values[v].cached
            ),
            forward_moments=tuple(self._forward_moments()),
            moments=tuple(self._backward_moments()),
            host_bytes=sum(option.host_bytes for option in compressed),
        )

    def _forward_moments(self) -> list[int]:
        """Return the live bytes of this block at each event of its forward. A payload is live from the event at which
        its value is saved, a retained value from its last non-autograd reference on (events before include it), and the
        state of a random generator from the event at which it is stored."""
        stored = sum(
            nbytes for value, nbytes in self.roots.items() if self._is_compressed(value) and not self._is_saved(value)
        )
        moments = []
        states = self._generator_state_bytes()
        # Inputs are encoded one after the other before the block runs.
        staging = max((self._staging_bytes(value) for value in self.roots if not self._is_saved(value)), default=0)
        for number, event in enumerate(self.kind.forward):
            stored += states.get(number, 0)
            if event.value in self.roots and event.death != self._is_compressed(event.value):
                stored += self.roots[event.value]
                staging = self._staging_bytes(event.value)
            moments.append(stored + staging + event.extra_bytes)
            staging = 0
        return moments

    def _staging_bytes(self, value: int) -> int:
        """Return the bytes on the device while a payload is copied to or from the host."""
        return self._option(value).staging_bytes if self._is_compressed(value) else 0

    def _generator_state_bytes(self) -> dict[int, int]:
        """Return the bytes of generator states that the forward stores, by the event at which they are stored: directly
        after autograd has saved a certain tensor. A tensor that views an earlier saved value is no event, so the state
        counts from the latest event before."""
        moments = [(number, event) for number, event in enumerate(self.kind.forward) if event.value >= 0]
        first_saved = {event.value: number for number, event in moments if not event.death}
        filled = [0]
        for value in self.kind.slots:
            filled.append(max(filled[-1], first_saved.get(value, 0)))
        state_bytes: dict[int, int] = {}
        for value in self.roots:
            if self.kind.values[value].is_generator_state:
                moment = filled[self.kind.values[value].taken_after]
                state_bytes[moment] = state_bytes.get(moment, 0) + self.roots[value]
        return state_bytes

    def _is_saved(self, value: int) -> bool:
        return self.kind.values[value].saved

    def _backward_moments(self) -> list[int]:
        root_death, death = self._deaths()
        decoded = self._decoded_bytes()
        freed_roots: dict[float, list[int]] = {}
        for root in self.roots:
            freed_roots.setdefault(root_death.get(root, math.inf), []).append(root)
        live = sum(self.roots.values())
        freed_bytes: dict[float, int] = {}
        moments = []
        for number, event in enumerate(self.events):
            during, after = decoded[number]
            if event.operator is not None:
                outputs = {value: self.kind.values[value].nbytes for value in event.operator.outputs}
                copies = 0
                for value, nbytes in outputs.items():
                    if self._is_available(value):
                        copies += nbytes
                        continue
                    live += nbytes
                    end = max(death.get(value, -1), number)
                    freed_bytes[end] = freed_bytes.get(end, 0) + nbytes
                moments.append(live + during + copies + event.operator.extra_bytes + event.entry_bytes)
            elif event.unpacked is not None:
                moments.append(live + during + event.entry_bytes)
            live -= freed_bytes.pop(number, 0) + sum(self.roots[root] for root in freed_roots.get(number, ()))
            if event.operator is None:
                moments.append(live + after + event.extra_bytes)
        return moments

    def _decoded_bytes(self) -> list[tuple[int, int]]:
        """Return (bytes during the event, bytes after it) of decoded values and of copies for autograd Functions."""
        spans: list[tuple[float, float, int]] = []
        for value in filter(self._is_compressed, self.uses):
            decoded, staging = self._decoded_spans(value), self._staging_bytes(value)
            spans += [*decoded, *((first, first, staging) for first, _, _ in decoded if staging)]
        for number in self.copying_events:
            slot = self.events[number].unpacked
            assert slot is not None  # copies are made at unpacks
            spans.append((number, self._release(slot), self.kind.values[self.kind.slots[slot]].nbytes))
        begins, ends = [0] * len(self.events), [0] * len(self.events)
        for first, last, nbytes in spans:
            begins[int(first)] += nbytes
            if last < len(self.events):
                ends[int(last)] += nbytes
        during = list(accumulate(begin - end for begin, end in zip(begins, [0, *ends], strict=False)))
        return [(live, live - end) for live, end in zip(during, ends, strict=True)]

    def _decoded_spans(self, value: int) -> list[tuple[float, float, int]]:
        """Return (first event, last event, bytes) of each period of backward in which `value` is live in decoded form.
        The decoded copy is freed after its last use, and after an unpack if none of the next DECODED_CACHE_UNPACKS
        unpacks reads it. If the copy is the unpacked tensor itself, it lives until autograd frees the slot."""
        uses = self.uses[value]
        ordinals = [bisect_left(self.unpacks, number) for number in uses]
        spans: list[tuple[float, float, int]] = []
        nbytes = self.kind.values[value].nbytes
        for index, (number, ordinal) in enumerate(zip(uses, ordinals, strict=True)):
            if index == 0 or ordinal - ordinals[index - 1] > DECODED_CACHE_UNPACKS:
                spans.append((number, number, nbytes))
            slot = self.events[number].unpacked
            end: float = number if index == len(uses) - 1 else self.unpacks[ordinal]
            end = end if slot is None else max(end, self._release(slot))
            spans[-1] = (spans[-1][0], max(spans[-1][1], end), nbytes)
        return spans

    def _copying_events(self) -> frozenset[int]:
        """Return the events at which a value is copied for the backward of an autograd Function written in Python."""
        if not self.kind.copied_slots:
            return frozenset()
        replayed = set().union(*(operators for _, operators in self.closures.values()))
        read = self._twins.union(*(self.kind.operators[index].inputs for index in replayed))
        copying_events = []
        for ordinal, number in enumerate(self.unpacks):
            slot = self.events[number].unpacked
            value = -1 if slot is None else self.kind.slots[slot]
            if slot not in self.kind.copied_slots or value not in read:
                continue
            later_uses = [use for use in self.uses[value] if use > number]
            if self._is_compressed(value):
                cache_end = ordinal + DECODED_CACHE_UNPACKS
                cached_until = self.unpacks[cache_end] if cache_end < len(self.unpacks) else math.inf
                is_live = bool(later_uses) and later_uses[0] <= cached_until
            else:
                is_live = self._is_available(value) or bool(later_uses)
            if is_live:
                copying_events.append(number)
        return frozenset(copying_events)

    def _is_available(self, value: int) -> bool:
        """Return True if `value` is in memory anyway, so that a replayed copy can be freed immediately."""
        return value in self.roots or self.kind.values[value].shared is not None
