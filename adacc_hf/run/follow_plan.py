"""One block under its plan: calls recorded or followed, shape by shape. The rules are in executor.py's NOTE."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from adacc_hf.artifacts.errors import OTHER_CLASSES, PolicyMismatchError, SavedOtherwiseError, TapeMismatchError
from adacc_hf.artifacts.files import note_latest
from adacc_hf.artifacts.policy import IDLE_KIND, RETAIN, Action, Choice, Plan
from adacc_hf.kernels.codecs import Codec, Coder, get_codec
from adacc_hf.run.blocks import Checkpointed
from adacc_hf.run.call import Call, CheckedCall, Recording
from adacc_hf.run.size_check import SizeCheck
from adacc_hf.tape.call_inputs import Given, argument_tensors, fetch
from adacc_hf.tape.call_key import CallKey, KnownShape, KnownShapes
from adacc_hf.tape.compiled_plan import CompiledPlan, choices_by_value, codec_of, unfit
from adacc_hf.tape.family import MOST_SIZES, TapeFamily
from adacc_hf.tape.library import TapeLibrary
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.private import version_of
from adacc_hf.torch_glue.states import RandomStates

log = logging.getLogger(__name__)

OTHER_OPERATORS = "other operators than when profiled, with the least memory"
VARYING = "operators, or numbers given to them, that vary from call to call"
NEW_DATA = "other data in what a block reads into Python, under torch's checkpoint"
UNRECORDED = "a path that no profile has recorded, under torch's checkpoint: to record it is above memory_budget"
OUT_OF_PLACE = "what a plan reads was elsewhere, as with an adapter that was merged for a call"
UNTRAINED = "blocks are trained that the profiled batch ran without gradients, under torch's checkpoint"
OTHER_RANKS = "other ranks take part in operators of blocks that torch's checkpoint must run"
"""Why a call ran otherwise than its plan says."""


@dataclass(slots=True)
class Entry:
    """How a block runs at one shape: under a compiled plan, or by torch's checkpoint where its tape is not trusted."""

    known: KnownShape
    compiled: CompiledPlan | None
    codecs: dict[int, Codec]
    seen: list[int] | None = None
    family: TapeFamily | None = None
    """What its tape was evaluated from, if it was not recorded."""
    base: Tape | None = None
    """The family's, when that was done."""
    is_proven: bool = True
    """Whether a call at this size has saved what its tape says."""
    is_within: bool = True
    """Whether the family was made of sizes around this one."""
    fallback: str | None = None
    """Why the block runs otherwise than its plan says; None if it does not."""
    compares: bool = False
    """Whether replay is to be compared once more at this size."""

    @property
    def program(self) -> CompiledPlan:
        """What a block runs under that has a plan to run under."""
        assert self.compiled is not None
        return self.compiled

    @property
    def is_current(self) -> bool:
        return self.family is None or (self.family.is_in_force and self.base is self.family.base)


class Observer(Protocol):
    """What may look at a call that a strategy runs."""

    def run(
        self, plan: FollowPlan, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Take itself off `plan`, have it run the call, and return the result."""


class FollowPlan:
    """The strategy that runs one block under its plan."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        library: TapeLibrary,
        known: KnownShapes | None = None,
        earlier: tuple[CompiledPlan | None, ...] = (),
    ) -> None:
        self.name = name
        self.plan = plan
        self._is_plain = plan.is_plain
        self._is_checkpointed = plan.kind == IDLE_KIND or any(
            _is_checkpointed_on_all_ranks(shape.tape) for shape in (known or {}).values()
        )
        self.library = library
        self.known = KnownShapes() if known is None else known
        """The block's shapes; all its plans share what is known of them."""
        self._earlier = earlier
        """What the block ran under before, kept until its first call so that a plan of the same actions shares it."""
        self.known.followers.add(self)
        self.entries: dict[CallKey, Entry] = {}
        """By what was recorded."""
        self._sized: OrderedDict[CallKey, Entry] = OrderedDict()
        """By sizes that were not: the latest ones."""
        self._bases: WeakKeyDictionary[TapeFamily, Entry] = WeakKeyDictionary()
        """What the entries of all sizes of a family are made from."""
        self._was_surprising = False
        """Whether the block ran otherwise than another one of its kind."""
        self.wrap_codec: Callable[[int, Codec], Coder] | None = None
        """If set, what stands around each activation's codec for the time being."""
        self.observer: Observer | None = None
        """If set, what runs the next call in place of this strategy."""

    @property
    def tapes(self) -> dict[Any, Tape]:
        """The block's tapes by shape."""
        return {key: known.tape for key, known in self.known.items()}

    def programs(self) -> tuple[CompiledPlan | None, ...]:
        """What the block runs under, or ran under last if it was not called yet."""
        entries = (*self.entries.values(), *self._bases.values())
        return tuple(entry.compiled for entry in entries) or self._earlier

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.observer is not None:
            return self.observer.run(self, block, fn, args, kwargs)
        if self._is_checkpointed:
            if self.plan.kind == IDLE_KIND or self._is_plain:
                self.library.fallbacks[UNTRAINED if self.plan.kind == IDLE_KIND else OTHER_RANKS] += 1
            return Checkpointed().run(block, fn, args, kwargs)
        if self._is_plain and (self.entries or self._bases):
            return fn(*args)
        key = self.known.key(block, args, kwargs)
        entry = self.entries.get(key) or self._known_entry(key) or self._sized_entry(key, block)
        if entry is None and self.known.is_unseen(key):
            self.library.fallbacks[NEW_DATA] += 1
            return self._run_untaped(any(t.has_collectives for t in self.tapes.values()), block, fn, args, kwargs)
        if entry is None:
            return self._first_call(key, block, fn, args, kwargs)
        self._count_fallback(entry)
        if entry.family is None and entry.compiled is not None:
            self.known.move_to_end(key)
        if entry.compiled is None:
            return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)
        is_checked = is_checked_call(entry.known.num_calls + 1) and not entry.compiled.is_plain
        if is_checked and is_being_captured():
            is_checked = False  # a CUDA graph cannot wait for a comparison: the next call is compared in its place
        else:
            entry.known.num_calls += 1
        self._learn_order(entry)
        if is_checked:
            return self._checked_call(entry, block, fn, args, kwargs)
        if not entry.is_proven:
            return self._unproven_call(key, entry, block, fn, args, kwargs)
        return self._call(entry, block, fn, args, kwargs)

    def run_again(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was run before, to look at it. It is not counted: calls are recorded by their number."""
        key = self.known.key(block, args, kwargs)
        entry = self.entries.get(key) or self._sized.get(key)
        if entry is None or entry.compiled is None or entry.compiled.is_plain:
            return self.run(block, fn, args, kwargs)
        self._learn_order(entry)
        is_checked = entry.known.num_calls > 1
        return (self._call if is_checked else self._checked_call)(entry, block, fn, args, kwargs)

    def _count_fallback(self, entry: Entry) -> None:
        if entry.fallback is not None:
            self.library.fallbacks[entry.fallback] += 1

    @staticmethod
    def _run_untaped(has_collectives: bool, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call that no tape fits. This rank alone may know: no collective may run again (rule R13)."""
        return fn(*args) if has_collectives else Checkpointed().run(block, fn, args, kwargs)

    def _call(
        self,
        entry: Entry,
        block: nn.Module,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        check: SizeCheck | None = None,
    ) -> Any:
        """Run one call under the plan, its operators compared with the tape if `check` is given."""
        compiled = entry.program
        if compiled.draws and is_being_captured():
            raise PolicyMismatchError(
                f"block {self.name} draws its dropout masks again in backward, which a CUDA graph cannot: capture it "
                f"under a policy of AdaccConfig(actions=('retain', 'compress')), or without dropout"
            )
        externals = fetch(compiled.externals, block, args, kwargs)
        # A layer that merged its adapter has its scales elsewhere for a call.
        if not compiled.has_all(externals):
            self.library.fallbacks[OUT_OF_PLACE] += 1
            return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)
        if check is not None:
            check.begin(block, args, kwargs)
        call = Call(compiled, self.name, self._codecs(entry), externals)
        if len(compiled.tape.order or ()) < compiled.num_slots:
            entry.seen = call.seen = []
        if check is None:
            result = call.run(fn, args)
        else:
            with torch.autograd.graph.saved_tensors_hooks(check.unseen(call.pack), call.unpack), check:
                result = fn(*args)
            check.finish()
            call.finish()
        self._refuse_replaced(compiled, externals, block)
        return result

    def _refuse_replaced(self, plan: CompiledPlan, externals: list[tuple[int, torch.Tensor]], block: nn.Module) -> None:
        """Raise TapeMismatchError if what the call read is not there any more where replay looks it up."""
        replaced = plan.replaced(externals, block) if plan.held else None
        if replaced is not None:
            raise TapeMismatchError(
                f"block {self.name} put another tensor in the place of {replaced} within a call, so that replay would "
                f"read an old one: make it a buffer; or, {OTHER_CLASSES}"
            )

    def _codecs(self, entry: Entry) -> Mapping[int, Coder]:
        if self.wrap_codec is None:
            return entry.codecs
        return {value: self.wrap_codec(value, codec) for value, codec in entry.codecs.items()}

    def _known_entry(self, key: CallKey) -> Entry | None:
        """The entry for a shape that was recorded under another plan."""
        known = self.known.get(key)
        if known is not None:
            self.entries[key] = self._entry(known)
            self._earlier = ()
        return self.entries.get(key)

    def _sized_entry(self, key: CallKey, block: nn.Module) -> Entry | None:
        """The entry for a size that was never recorded, if there is a family that serves it. Where replay is compared
        again (rule R7), what cannot be compared on the way has none."""
        entry = self._sized.get(key)
        if entry is not None and entry.is_current:
            return entry
        given = key.given_to(block)
        if not self.known.was_compared and self.library.expected(self.plan.kind, given, self.name) is not None:
            return None  # a profile has recorded this very size, perhaps long ago: it is compared with that
        untrusted = self.library.untrusted_at(given, self.name)
        if untrusted is not None:
            return self._entry(KnownShape(untrusted))
        within = self.library.family_at(given, self.name)
        found = within or self.library.family_beyond(given, self.name)
        tape = None if found is None else self.library.tape_of(*found)
        if found is None or tape is None:
            return None
        compares = found[0].takes_comparison(tape)
        if compares and _must_not_run_twice(tape):
            self.known.acquaint(key)  # to be recorded, if numbers that it reads are new as well
            return None
        entry = self._entry_at(found[0], tape)
        entry.is_within, entry.compares = within is not None, compares
        note_latest(self._sized, key, entry, MOST_SIZES)
        return entry

    def _entry_at(self, family: TapeFamily, tape: Tape) -> Entry:
        """How the block runs at the size that `tape` was evaluated for."""
        base = self._bases.get(family)
        if base is None or base.base is not family.base:
            base = self._bases[family] = self._entry(self.known.of_family(family), family.base)
            base.base = family.base
        compiled = self.library.resized(base.program, tape)
        fitting = {v: _fitting(codec, v, base.program, compiled) for v, codec in base.codecs.items()}
        codecs = {v: codec for v, codec in fitting.items() if codec is not None}
        if len(codecs) < len(fitting):  # this size is too small for one of them
            entry = self._entry(base.known, tape)
            entry.family, entry.base, entry.is_proven = family, family.base, False
            return entry
        return Entry(
            base.known,
            compiled,
            codecs,
            family=family,
            base=family.base,
            is_proven=compiled.is_plain,
            fallback=base.fallback,
        )

    def _unproven_call(
        self, key: CallKey, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call at a size that never ran. If it runs or saves other than its family says, it is run once more, and
        recorded: nothing but random generators was changed. Where more may be, it is recorded on the way."""
        tape, family, why = entry.program.tape, entry.family, None
        assert family is not None  # what was recorded is proven
        if _must_not_run_twice(tape):
            result = self._checked_call(entry, block, fn, args, kwargs)
            self._extend(key, entry, block)
            return result
        states, versions = RandomStates(entry.program.devices), _versions(block, args, kwargs)
        is_known = tape.is_checked and entry.is_within and not entry.compares
        check = None if is_known else SizeCheck(self.name, tape, entry.compares)
        try:
            result = self._call(entry, block, fn, args, kwargs, check)
        except SavedOtherwiseError as error:
            if _versions(block, args, kwargs) != versions:
                raise
            why = str(error)  # the error itself holds what the call has made
        else:
            if check is None or not check.unlike:
                entry.is_proven, entry.compares, tape.is_checked = True, False, True
                self._extend(key, entry, block)
                return result
            del result
            self.library.refuse(family, check.unlike, self.name)
        if why is not None and entry.is_within:  # beyond, other operators may run: they will have a family of their own
            self.library.distrust(family, self.name, why)
        states.restore()
        self._sized.clear()
        return self._first_call(key, block, fn, args, kwargs)

    def _extend(self, key: CallKey, entry: Entry, block: nn.Module) -> None:
        """Have the family of a size that ran as it says serve those in between too."""
        if entry.family is not None and entry.is_proven and not entry.is_within:
            entry.is_within = True
            self.library.extend(entry.family, key.given_to(block), self.name)

    def _learn_order(self, entry: Entry) -> None:
        """Learn the order of unpacks from the backward that asked for most slots, whichever came first."""
        if entry.seen:
            self.library.learn_order(entry.program.tape, entry.seen)
            entry.seen = None

    def _first_call(
        self, key: CallKey, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = key.given_to(block)
        expected = self._expected(key, given)
        if expected is None and self._is_too_large_to_record(given):
            self.library.warn_unrecorded(self.plan.kind, self.name, argument_tensors(args, kwargs))
            self.library.fallbacks[UNRECORDED] += 1
            return Checkpointed().run(block, fn, args, kwargs)
        self.known.was_compared = True
        if expected is not None and expected.compiled is None:  # torch's checkpoint is right whatever the call runs
            self._is_checkpointed = _is_checkpointed_on_all_ranks(expected.known.tape)
            self._remember(key, expected)
            self._count_fallback(expected)
            is_plain = self._is_plain and not self._is_checkpointed
            return fn(*args) if is_plain else Checkpointed().run(block, fn, args, kwargs)
        if expected is not None:
            done = self._checked(expected, block, fn, args, kwargs)
            if done is not None:
                self._count_fallback(expected)
                return self._end_expected_call(key, given, expected, *done)
        recording = Recording(self.name, block, args, kwargs)
        result = recording.run(fn)
        tape = self.library.verified(recording.recorder)
        if tape.structure in self.library.preliminary:  # the next call will be like all others, and is recorded
            self.library.fallbacks[OTHER_OPERATORS] += 1
            recording.close()
            return result
        self._is_checkpointed = _is_checkpointed_on_all_ranks(tape)
        self._compare_with_family(given, tape)
        self.library.remember(tape, given, self.name)
        entry = self._entry(KnownShape(tape, varies=self._is_unstable(key, tape)))
        self._remember(key, entry)
        self._count_fallback(entry)
        if entry.compiled is not None and not entry.compiled.is_plain:
            entry.seen = recording.hand_over(entry.compiled, self._codecs(entry))
        recording.close()
        return result

    def _is_too_large_to_record(self, given: Hashable) -> bool:
        """Whether a call on a path of its own has to do without a record, which holds all that the block makes.

        Not that of a block without any record, whose plan could never be followed, nor one at a size that a family is
        compared at (rule R7), nor one that other ranks take part in (rule R13).
        """
        tapes = self.tapes.values()
        if not tapes or any(tape.has_collectives for tape in tapes) or self.library.family_at(given, self.name):
            return False
        return not self.library.may_record()

    def _compare_with_family(self, given: Hashable, tape: Tape) -> None:
        """Hold what was recorded, and recomputed bit for bit, against what the family of its sizes says (rule R7)."""
        found = self.library.family_at(given, self.name)
        if found is None or tape.untrusted is not None:
            return
        family, sizes = found
        if not family.covers(sizes):  # sizes that were equal by chance so far: it will be made anew
            return
        if not family.agrees(tape, sizes):
            self.library.distrust(family, self.name, "a record of one has others")
        elif not tape.recomputable >= family.base.recomputable:
            self.library.refuse(family, family.base.recomputable - tape.recomputable, self.name)

    def _expected(self, key: CallKey, given: Hashable) -> Entry | None:
        """How the block probably runs at a shape where it never ran, if another one of its kind did."""
        if self._was_surprising or any(known.shape == key.shape for known in self.known):
            return None
        tape = self.library.expected(self.plan.kind, given, self.name)
        return None if tape is None else self._entry(KnownShape(tape))

    def _end_expected_call(
        self, key: CallKey, given: Given, expected: Entry, result: Any, tape: Tape, seen: list[int] | None
    ) -> Any:
        if tape.digest == expected.known.tape.digest:
            expected.known.tape, expected.seen = expected.known.tape.with_reads(tape.reads), seen
            self.library.remember(expected.known.tape, given, self.name)
            self._remember(key, expected)
        else:  # its next call is recorded as a first one, and so are those of other blocks: this one kept all it saved
            self._was_surprising = True
            self.library.fallbacks[OTHER_OPERATORS] += 1
            self.library.forget(self.plan.kind, given)
        return result

    def _remember(self, key: CallKey, entry: Entry) -> None:
        self.entries[self.known.add(key, entry.known)] = entry

    def forget(self, key: CallKey) -> None:
        """Let go of a shape that the block remembers no more."""
        self.entries.pop(key, None)

    def _is_unstable(self, key: CallKey, tape: Tape) -> bool:
        """Whether the block is given other Python values again and again, and runs other operators with each."""
        state = self.known.state
        if state is None:
            return False
        others = {known.tape.digest for other, known in self.known.items() if key == other._replace(state=key.state)}
        if others:
            state.learn(same_operators=tape.digest in others)
        if state.is_unstable:
            self.library.warn_unstable(self.name, tape, state.changed)
        return state.is_unstable

    def _checked_call(self, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Record the call once more; if it ran other operators, torch's checkpoint takes over at this shape."""
        done = self._checked(entry, block, fn, args, kwargs)
        if done is None:
            self.library.fallbacks[OUT_OF_PLACE] += 1
            return self._run_untaped(entry.known.tape.has_collectives, block, fn, args, kwargs)
        result, tape, seen = done
        planned = entry.program.tape
        if seen is not None and (entry.family is not None or tape.digest == planned.digest):
            entry.seen = seen
            entry.is_proven = planned.is_checked = True
        elif entry.family is not None:
            why = "they vary from call to call" if entry.is_proven else "a call of a new one ran others"
            self.library.distrust(entry.family, self.name, why)
            self.library.fallbacks[VARYING] += 1
            entry.known.varies = True
            self._sized.clear()
        else:
            self.library.warn_varying(self.name, tape)
            self.library.fallbacks[VARYING] += 1
            entry.compiled, entry.known.varies, entry.fallback = None, True, VARYING
        return result

    def _checked(
        self, entry: Entry, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Tape, list[int] | None] | None:
        """(result, record of the call, list that the order of unpacks goes into) of a call that is recorded on the way.

        There is no such list if the call left the plan's tape. None if what the plan needs is not there, as with an
        adapter that was merged for this call: nothing has run.
        """
        compiled = entry.program
        externals = fetch(compiled.externals, block, args, kwargs)
        if not compiled.has_all(externals):
            return None
        call = CheckedCall(self.name, block, args, kwargs, compiled, self._codecs(entry), externals)
        result, tape = call.run(fn)
        self._refuse_replaced(compiled, externals, block)
        return result, tape, call.seen

    def _entry(self, known: KnownShape, tape: Tape | None = None) -> Entry:
        """How the block runs on the tape of `known`, or at another size."""
        tape = tape or known.tape
        if tape.untrusted is not None:
            self.library.warn_untrusted(self.name, tape)
        if tape.untrusted is not None or known.varies:
            return Entry(known, None, {}, fallback=self._fallback_of(known, tape))
        choices, is_planned = self.choices(tape)
        shared = frozenset(
            value.index for value in tape.values if tape.is_block_input(value.index) and value.index not in choices
        )
        compiled = self.library.compiled(tape, choices, shared)
        codecs = {value: codec_of(choice) for value, choice in choices.items() if choice.action is Action.COMPRESS}
        return Entry(known, compiled, codecs, fallback=None if is_planned or self._is_plain else OTHER_OPERATORS)

    def _fallback_of(self, known: KnownShape, tape: Tape) -> str | None:
        """Why a call that no plan fits is run otherwise than planned; None if the profile found it to be such too, so
        that the plan says how torch's checkpoint runs it."""
        if tape.untrusted is None:
            return VARYING
        is_planned = self._is_plain or _structure_of(self.plan.kind) == _structure_of(tape.kind)
        return None if is_planned else f"torch's checkpoint, since {tape.untrusted}"

    def choices(self, tape: Tape) -> tuple[dict[int, Choice], bool]:
        """The plan's choices as far as they can be followed on this tape, least memory for what it has besides, and
        whether it runs what was planned.

        Raises PolicyMismatchError if the same call ran other operators when it was profiled, or another block did. Once
        the block has fitted its plan, other operators are a change in mid-training: weights frozen or set free, say.
        """
        structure, _, identity, call = (self.plan.kind.split("-") + [""] * 3)[:4]
        own_structure, _, own_identity, own_call = tape.kind.split("-")
        if structure != own_structure:
            fitted = (*self.tapes.values(), *(known.tape for known in self.known.of_families.values()))
            planned = next((known for known in fitted if known.structure.startswith(structure)), None)
            if planned is None and (identity != own_identity or call == own_call):
                raise PolicyMismatchError(
                    f"block {self.name} ({tape.block_class}: {len(tape.operators)} operators, {len(tape.slots)} saved "
                    f"tensors) has tape {tape.kind}, the policy was made for tape {self.plan.kind}: the model, its "
                    f"attention, dropout or precision differ; profile this model and solve a policy for it"
                )
            planned = planned or self.library.tape_of_structure(structure)
            same, is_whole = ({}, False) if planned is None else planned.values_in(tape)
            if self._is_plain and not is_whole:
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


def _is_checkpointed_on_all_ranks(tape: Tape) -> bool:
    """Whether torch's checkpoint runs the block whatever its plan says: the ranks' plans may differ (rule R13)."""
    return tape.untrusted is not None and tape.has_collectives


def _structure_of(kind: str) -> str:
    return kind.partition("-")[0]


def _must_not_run_twice(tape: Tape) -> bool:
    """Whether a call that ran otherwise than `tape` cannot be run again from its start."""
    return tape.changes_state or tape.has_collectives


def _versions(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """How often what a call of `block` might write into was written."""
    given = [tensor for _, tensor in argument_tensors(args, kwargs)]
    return [version_of(tensor) for tensor in (*block.buffers(), *given)]


def _fitting(codec: Codec, value: int, base: CompiledPlan, sized: CompiledPlan) -> Codec | None:
    """The codec of `value` at another size: with the same channels that stay raw, where it has as many."""
    size, dtype = sized.encode_views[value].geometry[0], sized.encode_views[value].dtype
    if not codec.supports(size, dtype):
        return None
    return codec if size[-1:] == base.encode_views[value].geometry[0][-1:] else get_codec(codec.name, **codec.options)


def is_being_captured() -> bool:
    """Whether what is launched now becomes a part of a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_checked_call(num_calls: int) -> bool:
    """Whether the n-th call of a block at one shape is recorded again, to find operators that vary (rule R8).

    The second is, before the first replay of an old record, and then the 24th, 48th, 96th and so on. Powers of two are
    left alone: tracking has these, and recording takes time of its own.
    """
    thirds, rest = divmod(num_calls, 3)
    return num_calls == 2 or (rest == 0 and thirds >= 8 and thirds & (thirds - 1) == 0)
