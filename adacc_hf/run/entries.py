"""Entries of one block under one plan: for each key of a call, the compiled plan that it runs under, and its state."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.files import note_latest
from adacc_hf.artifacts.policy import RETAIN, Action, Choice, Plan
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.tape.call_key import CallKey, KnownShape, KnownShapes
from adacc_hf.tape.data_reads import data_at
from adacc_hf.tape.execution_plan import ExecutionPlan, choices_by_value, codec_of, unfit
from adacc_hf.tape.symbolic_tape import MOST_SIZES, SymbolicTape
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tape_cache import TapeCache

log = logging.getLogger(__name__)

OTHER_OPERATORS = "other operators than when profiled, with the least memory"
VARYING = "operators, or numbers given to them, that vary from call to call"
NEW_DATA = "other data in what a block reads into Python, under torch's checkpoint"
UNRECORDED = "a path that no profile has recorded, under torch's checkpoint: to record it is above memory_budget"
OUT_OF_PLACE = "what a plan reads was elsewhere, as with an adapter that was merged for a call"
UNTRAINED = "blocks are trained that the profiled batch ran without gradients, under torch's checkpoint"
OTHER_RANKS = "other ranks take part in operators of blocks that torch's checkpoint must run"
"""Reasons why a call did not run under its plan."""


@dataclass(slots=True)
class Entry:
    """Compiled plan of a block at one key, or torch's checkpoint in its place if the tape is not trusted."""

    known: KnownShape
    compiled: ExecutionPlan | None
    """None: torch's checkpoint."""
    codecs: dict[int, Codec]
    seen: list[int] | None = None
    """Slots in the order in which a backward has asked for them, until the library learns it."""
    family: SymbolicTape | None = None
    """The family that the tape was evaluated from; None for a recorded tape."""
    base: Tape | None = None
    """`family.base` when the tape was evaluated. It changes if values are refused."""
    fallback: str | None = None
    """The reason why the block does not follow its plan; None if it does."""

    @property
    def program(self) -> ExecutionPlan:
        """The compiled plan of an entry that has one."""
        assert self.compiled is not None
        return self.compiled

    @property
    def is_current(self) -> bool:
        return self.family is None or (self.family.is_in_force and self.base is self.family.base)


class PlanEntries:
    """All entries of a block under one plan. Each is made at the first call with its key."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        library: TapeCache,
        known: KnownShapes,
        earlier: tuple[ExecutionPlan | None, ...] = (),
    ) -> None:
        self.name = name
        self.plan = plan
        self.library = library
        self.known = known
        """The block's shapes, shared by all its plans."""
        self._earlier = earlier
        """Compiled plans of the previous plan, kept until the block's first call, so that a plan with the same actions
        shares them."""
        known.followers.add(self)
        self.recorded: dict[CallKey, Entry] = {}
        """Entries of recorded calls."""
        self.sized: OrderedDict[CallKey, Entry] = OrderedDict()
        """Entries of calls at sizes that were not recorded, the latest last."""
        self.bases: WeakKeyDictionary[SymbolicTape, Entry] = WeakKeyDictionary()
        """By family, the entry that the entries of all its sizes are made from."""
        self.was_surprised = False
        """Whether a first call ran other operators than the record of another block of the kind."""

    @property
    def are_empty(self) -> bool:
        return not self.recorded and not self.bases

    @property
    def tapes(self) -> list[Tape]:
        """The block's tapes."""
        return [known.tape for known in self.known.values()]

    def programs(self) -> tuple[ExecutionPlan | None, ...]:
        """Return the compiled plans of the block, or those of its previous plan if it was not called yet."""
        entries = (*self.recorded.values(), *self.bases.values())
        return tuple(entry.compiled for entry in entries) or self._earlier

    def find(self, key: CallKey) -> Entry | None:
        """Return the entry of a call; None if the call has to be recorded, or compared with an earlier record."""
        return self.recorded.get(key) or self._known_entry(key) or self._sized_entry(key)

    def latest(self, key: CallKey) -> Entry | None:
        """Return the entry of the last call with this key."""
        return self.recorded.get(key) or self.sized.get(key)

    def add(self, key: CallKey, known: KnownShape) -> Entry:
        """Make and keep the entry of a recorded call."""
        return self.keep(key, self._entry(known))

    def keep(self, key: CallKey, entry: Entry) -> Entry:
        """Keep the entry of a call that ran as its tape says."""
        self.recorded[self.known.add(key, entry.known)] = entry
        return entry

    def _known_entry(self, key: CallKey) -> Entry | None:
        """Return the entry for a key that was recorded under another plan of the block, or None."""
        known = self.known.get(key)
        if known is not None:
            self.recorded[key] = self._entry(known)
            self._earlier = ()
        return self.recorded.get(key)

    def _sized_entry(self, key: CallKey) -> Entry | None:
        """Return the entry for a size that was never recorded, or None if no family serves it."""
        entry = self.sized.get(key)
        if entry is not None and entry.is_current:
            return entry
        if not self.known.was_compared and self.library.expected(self.plan.kind, key, self.name) is not None:
            return None  # a profile has recorded this very size: the first call is compared with that record
        untrusted = self.library.untrusted_at(key, self.name)
        if untrusted is not None:
            return self._entry(KnownShape(untrusted))
        found = self.library.family_at(key, self.name)
        tape = None if found is None else self.library.tape_of(*found)
        if found is None or tape is None:
            return None
        entry = self._entry_at(found[0], tape)
        note_latest(self.sized, key, entry, MOST_SIZES)
        return entry

    def _entry_at(self, family: SymbolicTape, tape: Tape) -> Entry:
        """Return the entry for the size that `tape` was evaluated for."""
        base = self.bases.get(family)
        if base is None or base.base is not family.base:
            base = self.bases[family] = self._entry(self.known.of_family(family), family.base)
            base.base = family.base
        compiled = self.library.resized(base.program, tape)
        fitting = {v: _fitting(codec, v, base.program, compiled) for v, codec in base.codecs.items()}
        codecs = {v: codec for v, codec in fitting.items() if codec is not None}
        if len(codecs) < len(fitting):  # the size is too small for a codec
            entry = self._entry(base.known, tape)
            entry.family, entry.base = family, family.base
            return entry
        return Entry(base.known, compiled, codecs, family=family, base=family.base, fallback=base.fallback)

    def expected(self, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """Return an entry with the tape that a profile or another block has recorded for a key, or None."""
        if self.was_surprised or any(known.shape == key.shape for known in self.known):
            return None
        tape = self.library.expected(self.plan.kind, key, self.name)
        if tape is None:
            return None
        reads = {path: data_at(path, args, kwargs) for path in tape.reads}
        known = {path: data for path, data in reads.items() if data is not None}
        return self._entry(KnownShape(tape.with_reads(known))) if len(known) == len(reads) else None

    def forget(self, key: CallKey) -> None:
        """Drop the entry of a key that the block has forgotten."""
        self.recorded.pop(key, None)

    def _entry(self, known: KnownShape, tape: Tape | None = None) -> Entry:
        """Return the entry for the tape of `known`, or for its tape at another size."""
        tape = tape or known.tape
        if tape.untrusted is not None:
            self.library.warn_untrusted(self.name, tape)
        if tape.untrusted is not None or known.varies:
            return Entry(known, None, {}, fallback=self._fallback_of(tape))
        choices, is_planned = self.choices(tape)
        shared = frozenset(
            value.index for value in tape.values if tape.is_block_input(value.index) and value.index not in choices
        )
        compiled = self.library.compiled(tape, choices, shared)
        codecs = {value: codec_of(choice) for value, choice in choices.items() if choice.action is Action.COMPRESS}
        return Entry(known, compiled, codecs, fallback=None if is_planned or self.plan.is_plain else OTHER_OPERATORS)

    def _fallback_of(self, tape: Tape) -> str | None:
        """Return the reason why torch's checkpoint runs a call that no plan fits. None if the plan says so itself, or
        runs the call plainly."""
        if tape.untrusted is None:
            return VARYING
        is_planned = self.plan.is_plain or self.plan.is_checkpointed
        return None if is_planned else f"torch's checkpoint, since {tape.untrusted}"

    def choices(self, tape: Tape) -> tuple[dict[int, Choice], bool]:
        """Return the choices for this tape, and whether it has the planned operators.

        Choices that cannot be followed, and values that the plan does not know, get the least memory. Raises
        PolicyMismatchError if the tape has other operators than the same call had when it was profiled. Once the block
        has fitted its plan, other operators come from a change in mid-training, as of weights that are frozen.
        """
        structure, _, identity, call = (self.plan.kind.split("-") + [""] * 3)[:4]
        own_structure, _, own_identity, own_call = tape.kind.split("-")
        if structure != own_structure:
            fitted = (*self.tapes, *(known.tape for known in self.known.of_families.values()))
            planned = next((known for known in fitted if known.structure.startswith(structure)), None)
            recorded = self.library.tape_of_structure(structure)
            # A profile in this process was of this very model, which may take another path by now.
            if planned is None and (identity != own_identity or (call == own_call and recorded is None)):
                raise PolicyMismatchError(
                    f"block {self.name} ({tape.block_class}: {len(tape.operators)} operators, {len(tape.slots)} saved "
                    f"tensors) has tape {tape.kind}, the policy was made for tape {self.plan.kind}: the model, its "
                    f"attention, dropout or precision differ; profile this model and solve a policy for it"
                )
            planned = planned or recorded
            same, is_whole = ({}, False) if planned is None else planned.values_in(tape)
            if self.plan.is_plain and not is_whole:
                return {}, False
            if not is_whole:
                self.library.warn_unplanned(self.name, tape)
            return choices_by_value(dict(self.plan.choices), tape, same, with_loss=is_whole), is_whole
        choices = dict(self.plan.choices)
        retained = unfit(choices, tape)
        if retained:
            names = ", ".join(tape.values[value].name for value in retained)
            log.warning(
                "Adacc: block %s retains %s: no replay or codec can do what was planned, "
                "or a replay would read what is stored with loss",
                self.name,
                names,
            )
        return choices | dict.fromkeys(retained, RETAIN), True


def _fitting(codec: Codec, value: int, base: ExecutionPlan, sized: ExecutionPlan) -> Codec | None:
    """Return the codec of `value` at another size, or None. It keeps the same channels raw if there are as many."""
    size, dtype = sized.encode_views[value].geometry[0], sized.encode_views[value].dtype
    if not codec.supports(size, dtype):
        return None
    return codec if size[-1:] == base.encode_views[value].geometry[0][-1:] else get_codec(codec.name, **codec.options)
