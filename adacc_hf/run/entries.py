"""Cache of one block under one plan: for each call key, an entry with the execution plan to run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.policy import RETAIN, Choice, Plan
from adacc_hf.kernels.codecs import Codec
from adacc_hf.tape.execution_plan import ExecutionPlan, choices_by_value, codec_of, unfit_values
from adacc_hf.tape.guards import CallKey, KnownShapes
from adacc_hf.tape.symbolic_tape import MOST_SIZES, SymbolicTape
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_cache import TapeCache

MAX_SHAPES = 512
"""Maximum number of call keys that a block remembers, least recently used goes first. Sequences have hundreds of
lengths, and recording a shape again takes as long as about ten steps. A tape and its plan take about 130 KiB."""

OTHER_OPERATORS = "other operators than when profiled, with the least memory"
OUT_OF_PLACE = "a tensor that a plan reads was replaced or removed, for example an adapter merged for a call"
UNTRAINED = "blocks train that the profiled batch ran without gradients, run under torch's checkpoint"
OTHER_RANKS = "collective operators in blocks that must run under torch's checkpoint"
"""Reason for a call that did not follow its plan. Calls are counted by reason in `TapeCache.fallbacks`."""


@dataclass(slots=True)
class Entry:
    """Instructions to run a block's calls with one call key: an execution plan, or torch's checkpoint."""

    tape: Tape
    """The recorded tape, or the tape of `symbolic_tape` at the size of the calls."""
    calls: Iterator[int]
    """Numbers of the next calls. The first calls of a tape are checked (`is_checked_call`), unless an earlier plan of
    the block or a profile has run them."""
    execution_plan: ExecutionPlan | None
    """Execution plan of the calls. None if the calls run under torch's checkpoint."""
    codecs: dict[int, Codec]
    """Codec of each value that the plan compresses."""
    unpacked_slots: list[int] | None = None
    """Slots in the order in which a backward unpacked them. None once the order is in the tape cache."""
    symbolic_tape: SymbolicTape | None = None
    """Symbolic tape (for all sizes) from which the tape of this entry was computed. None for a recorded tape."""
    fallback: str | None = None
    """The reason why the block does not follow its plan, or None."""

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan. Do not use this property if the entry's calls run under torch's checkpoint."""
        assert self.execution_plan is not None
        return self.execution_plan

    @property
    def is_current(self) -> bool:
        """True if the entry's tape is recorded, or was computed from a symbolic tape that is still in use."""
        return self.symbolic_tape is None or self.symbolic_tape.is_active


class PlanEntries:
    """Entries of a block under one plan, by call key. An entry is created at the first call with its key."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        tape_cache: TapeCache,
        known_shapes: KnownShapes,
    ) -> None:
        self.name = name
        self.plan = plan
        self.tape_cache = tape_cache
        self.known_shapes = known_shapes
        """Table of the block's recorded tapes by call key (traced path and sizes), shared by all plans of the block."""
        self.recorded: OrderedDict[CallKey, Entry] = OrderedDict()
        """Entries whose tape was recorded, by call key. The latest entry is last."""
        self.sized: OrderedDict[CallKey, Entry] = OrderedDict()
        """Entries for sizes at which no call was recorded, by call key. The latest entry is last."""
        self._codecs: WeakValueDictionary[tuple[str, int, tuple[int, ...]], Codec] = WeakValueDictionary()
        """Codecs by (`Tape.structure`, value, number of channels). A codec chooses its outlier channels once for all
        sizes with as many channels."""

    def find(self, key: CallKey) -> Entry | None:
        """Return the entry for `key`, with a tape of the block, a profile or a block of the kind, or None."""
        return self.recorded.get(key) or self._known_entry(key) or self._sized_entry(key)

    def add(self, key: CallKey, tape: Tape, next_call: int) -> Entry:
        """Create and cache the entry of a recorded call. `next_call` is the number of the next call with `key`."""
        entry = self._entry(tape, count(next_call))
        put_latest(self.recorded, key, entry, MAX_SHAPES)
        put_latest(self.known_shapes, key, tape, MAX_SHAPES)
        return entry

    def _known_entry(self, key: CallKey) -> Entry | None:
        """Return an entry with a tape recorded for `key` under another plan, in a profile or another block, or None."""
        tape = self.known_shapes.get(key)
        if tape is not None:
            return self.add(key, tape, next_call=3)
        tape = self.tape_cache.expected_tape(self.plan.kind, key, self.name)
        if tape is None:
            return None
        self.tape_cache.remember(tape, key, self.name)
        return self.add(key, tape, next_call=1)

    def _sized_entry(self, key: CallKey) -> Entry | None:
        """Return the entry for a size at which no call was recorded, or None if no symbolic tape covers the size."""
        entry = self.sized.get(key)
        if entry is not None and entry.is_current:
            return entry
        untrusted_tape = self.tape_cache.untrusted_at(key, self.name)
        if untrusted_tape is not None:
            return self._entry(untrusted_tape, count(1))
        match = self.tape_cache.symbolic_tape_at(key, self.name)
        tape = None if match is None else self.tape_cache.tape_of(*match)
        if match is None or tape is None:
            return None
        # No check of the second call: the first calls of new sizes are checked (`Tape.is_unchecked`).
        entry = self._entry(tape, count(3), match[0])
        put_latest(self.sized, key, entry, MOST_SIZES)
        return entry

    def _entry(self, tape: Tape, calls: Iterator[int], symbolic_tape: SymbolicTape | None = None) -> Entry:
        """Create the entry for calls with the operators of `tape`, recorded or computed from `symbolic_tape`."""
        if tape.untrusted is not None:
            self.tape_cache.warn_not_replayed(self.name, tape.structure, tape.untrusted)
            return Entry(tape, calls, None, {}, fallback=self.fallback_of(tape.untrusted))
        choices, is_planned = self.choices(tape)
        shared = frozenset(
            value.index for value in tape.values if tape.is_block_input(value.index) and value.index not in choices
        )
        plan = self.tape_cache.execution_plan(tape, choices, shared)
        codecs: dict[int, Codec] = {}
        for value, view in plan.encode_views.items():
            key = tape.structure, value, view.geometry[0][-1:]
            codecs[value] = self._codecs[key] = self._codecs.get(key) or codec_of(choices[value])
        fallback = None if is_planned or self.plan.is_plain else OTHER_OPERATORS
        return Entry(tape, calls, plan, codecs, symbolic_tape=symbolic_tape, fallback=fallback)

    def fallback_of(self, reason: str) -> str | None:
        """Return the reason to record for calls under torch's checkpoint, or None if the plan is plain."""
        return None if self.plan.is_plain else f"torch's checkpoint, since {reason}"

    def choices(self, tape: Tape) -> tuple[dict[int, Choice], bool]:
        """Return (choice by value of `tape`, True if `tape` has the operators that the plan was made for).

        With the plan's operators, values whose planned choice is impossible are retained. With other operators, values
        that match planned ones of the same dtype, stored without loss, follow the plan, and others get the choice with
        the least memory.

        Raise PolicyMismatchError if the tape's operators differ from those of the same call in the profile, unless the
        block has run the planned operators before: operators may change, when weights are frozen for example.
        """
        structure, _, identity, call = (self.plan.kind.split("-") + [""] * 3)[:4]
        own_structure, _, own_identity, own_call = tape.kind.split("-")
        if structure != own_structure:
            own_tapes = (*self.known_shapes.values(), *(entry.tape for entry in self.sized.values()))
            planned_tape = next((own for own in own_tapes if own.structure.startswith(structure)), None)
            recorded_tape = next(iter(self.tape_cache.tapes_of_kind(structure)), None)
            is_other = identity != own_identity or (call == own_call and recorded_tape is None)
            if planned_tape is None and is_other and not self.tape_cache.has_profile:
                raise PolicyMismatchError(
                    f"block {self.name} ({tape.block_class}: {len(tape.operators)} operators, {len(tape.slots)} saved "
                    f"tensors) has tape {tape.kind}, but the policy was made for tape {self.plan.kind}: the model, its "
                    f"attention, dropout or precision differ; profile this model and solve a policy for it"
                )
            planned_tape = planned_tape or recorded_tape
            matching, is_complete = ({}, False) if planned_tape is None else planned_tape.values_in(tape)
            if self.plan.is_plain and not is_complete:
                return {}, False
            if not is_complete:
                self.tape_cache.warn_unplanned(self.name, tape)
            planned = dict(self.plan.choices)
            if planned_tape is not None and not is_complete:  # values of another precision may store more bytes
                before, now = planned_tape.values, tape.values
                for value, choice in self.plan.choices:
                    is_like = value in matching and before[value].ref.dtype is now[matching[value]].ref.dtype
                    if not is_like or (choice.codec is not None and not codec_of(choice).lossless):
                        del planned[value]
            return choices_by_value(planned, tape, matching), is_complete
        choices = dict(self.plan.choices)
        retained = unfit_values(choices, tape)
        if retained:
            names = ", ".join(tape.values[value].name for value in retained)
            self.tape_cache.warn_once(
                f"{self.name} retains {names}",
                "Adacc: block %s retains %s: the planned replay or codec is not possible here, or replay would read a "
                "value stored with loss",
                self.name,
                names,
            )
        return choices | dict.fromkeys(retained, RETAIN), True
