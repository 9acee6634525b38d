"""The tapes of a model and the plans compiled for them, each kept once."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from adacc_hf.artifacts.files import note_latest
from adacc_hf.artifacts.policy import Choice
from adacc_hf.artifacts.profile import KindProfile, unpack_order
from adacc_hf.tape.call_key import CallKey
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.guards import Untraceable
from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.replay_check import equal_values, verify
from adacc_hf.tape.symbolic_tape import CallSizes, RecordedCall, SeenSizes, SymbolicTape, identity_of, without_values
from adacc_hf.tape.tape import Tape

log = logging.getLogger(__name__)

MOST_OUTLINES = 16
"""Sorts of calls of a block whose sizes are remembered: with and without a padding mask, say."""
CUDA_ALIGNMENT = 16
"""Elements that attention's kernels on a GPU want the last dimension of a mask to be a multiple of; others are padded,
by operators of their own."""


_OTHER_SIZE = (
    "as a smaller last batch or one without padding does",
    "set dataloader_drop_last=True, or pad to one length",
)
_OTHER_MODE = (
    "though a batch of these sizes was recorded: autocast, frozen weights, a module in eval mode or another kernel of "
    "attention do that",
    "profile and train in the same mode",
)
"""What may make a block run other operators, and what to do about it: where its sizes are new, and where they are
not."""


class TapeCache:
    """The tapes of a model, shared by blocks that recorded the same. A tape is freed when no block remembers its key.

    Tapes of a profile stay: see `library_of_profiles`.
    """

    def __init__(self, verify: Callable[[Tape, list[torch.Tensor]], frozenset[int]] = verify) -> None:
        self._verify = verify
        self._tapes: WeakValueDictionary[str, Tape] = WeakValueDictionary()
        self._compiled: WeakValueDictionary[Any, ExecutionPlan] = WeakValueDictionary()
        self._of_calls: WeakValueDictionary[tuple[str, CallKey, str | None], Tape] = WeakValueDictionary()
        """By structure, key, and block; None: whichever ran last."""
        self._kept: dict[str, Tape] = {}
        """What was taken from other libraries, by digest."""
        self._seen: dict[str, OrderedDict[Hashable, SeenSizes]] = {}
        """By block, and by what its calls have in common but for sizes."""
        self._families: WeakValueDictionary[Hashable, SymbolicTape] = WeakValueDictionary()
        """By the records that they are made of."""
        self._refused: dict[str, set[int]] = {}
        """By structure, values that replay did not recompute at some size."""
        self._alignment = 1
        self._latest: tuple[CallKey, CallSizes] | None = None
        """The latest key and its sizes: the blocks of a model are given the same, one after the other."""
        self._orders: dict[str, tuple[int, ...]] = {}
        """In which order backward asks for saved tensors, by structure: sizes do not change it."""
        self.preliminary: set[str] = set()
        """Structures of tapes that blocks run in their first call alone, in which they make tables to read later."""
        self.untraceable = Untraceable()
        """Paths of the model's blocks that cannot be traced."""
        self.fallbacks: Counter[str] = Counter()
        """Calls of blocks that ran otherwise than their plans say, by why; who counts steps empties it."""
        self.may_record: Callable[[], bool] = lambda: True
        """Whether a call unlike any recorded one may take the memory of a record: whoever keeps a budget knows."""
        self._warned: set[str] = set()
        self._has_unplanned = False

    def verified(self, recorder: Recorder) -> Tape:
        """The tape of what `recorder` saw; replay is verified for the first of its kind."""
        tape = recorder.tape()
        known = self._tapes.get(tape.digest)
        if known is not None:
            return known.with_reads(tape.reads)
        if tape.untrusted is None:
            with torch.no_grad(), _autocast_off(tape):
                found = self._verify(tape, recorder.bases)
                tape.recomputable = without_values(tape, found, self._refused.get(tape.structure, ()))
                tape.equal = equal_values(tape, tape.recomputable)
            self._warn_stored(recorder, tape)
        tape.order = self._orders.get(_structure(tape.structure))
        self._tapes[tape.digest] = tape
        return tape

    def _warn_stored(self, recorder: Recorder, tape: Tape) -> None:
        """Say once per Function that what it makes is stored, and why."""
        refused = dict(recorder.refused)
        for operator in tape.operators:
            if operator.is_function and not tape.recomputable.issuperset(operator.made()):
                refused[operator.name.partition(".")[2]] = "does not make the same bits when it runs again"
        for name, why in refused.items():
            if name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "Adacc: block %s: what kernels of the autograd.Function %s write is stored, not recomputed: the "
                    "Function %s",
                    tape.block_class,
                    name,
                    why,
                )

    def expect_orders(self, kinds: Iterable[KindProfile]) -> None:
        """Expect backward to ask for slots in the order that was seen when `kinds` were profiled."""
        for kind in kinds:
            if kind.untrusted is None:
                self._expect_order(kind.digest, unpack_order(kind.backward))

    def expect_same_orders(self, other: TapeCache) -> None:
        """Expect backward to ask for slots in the orders that `other` knows."""
        self._orders.update(other._orders)

    def remember(self, tape: Tape, key: CallKey, block: str) -> None:
        """Note that a call of `block` with this key ran as `tape` says."""
        for name in (block, None):
            self._of_calls[_structure(tape.kind), key, name] = tape
        if any(value.device.type == "cuda" for value in tape.values):
            self._alignment, self._latest = CUDA_ALIGNMENT, None
        if all(isinstance(data, tuple) for data in tape.reads.values()):  # of other data no rule is known
            sizes = self._sizes_of(key._replace(data=key.data or tuple(tape.reads.values())))
            self._seen_sizes(block, sizes).add(RecordedCall(sizes, tape), self._family)

    def family_at(self, key: CallKey, block: str) -> tuple[SymbolicTape, CallSizes] | None:
        """Return (family, sizes) for a call of `block` with this key; None if no family serves it."""
        sizes = self._sizes_of(key)
        family = self._seen_sizes(block, sizes).family_in_force()
        return None if family is None else (family, sizes)

    def extend(self, family: SymbolicTape, key: CallKey) -> None:
        """Note that a call with this key ran as its tape of `family` says."""
        family.extend(self._sizes_of(key))

    def tape_of(self, family: SymbolicTape, sizes: CallSizes) -> Tape | None:
        """Return the tape of a call of these sizes; None if the family does not cover them."""
        return family.tape_at(sizes, self._orders.get(_structure(family.base.structure)))

    def untrusted_at(self, key: CallKey, block: str) -> Tape | None:
        """Return an untrusted tape of `block` at another size, if all its tapes of this outline were untrusted."""
        return self._seen_sizes(block, self._sizes_of(key)).untrusted

    def refuse(self, family: SymbolicTape, values: Collection[int], block: str) -> None:
        """Replay did not recompute `values` at a new size: retain them at all sizes."""
        names = ", ".join(family.base.values[value].name for value in sorted(values))
        log.warning(
            "Adacc: at a new size replay did not recompute %s of block %s bit for bit: retained from now on, at all "
            "sizes",
            names,
            block,
        )
        self._refused.setdefault(family.base.structure, set()).update(values)
        for known in list(self._families.values()):
            if known.base.structure == family.base.structure:
                known.refuse(values)

    def compare_with_family(self, tape: Tape, key: CallKey, block: str) -> None:
        """Compare a record, and what replay recomputed of it, with what the family of its sizes says (rule R7)."""
        found = self.family_at(key, block)
        if found is None or tape.untrusted is not None:
            return
        family, sizes = found
        if not family.covers(sizes):  # sizes that were equal by chance so far: it will be made anew
            return
        if not family.agrees(tape, sizes):
            self.distrust(family, block, "a record of one has others")
        elif not tape.recomputable >= family.base.recomputable:
            self.refuse(family, family.base.recomputable - tape.recomputable, block)

    def distrust(self, family: SymbolicTape, block: str, why: object) -> None:
        """A call at a new size did not run as `family` says: have each size recorded from now on."""
        log.warning(
            "Adacc: block %s runs other operators at some sizes of a batch than at others (%s): each new size is "
            "recorded from now on, which takes time; pad batches to few lengths (pad_to_multiple_of) to save it",
            block,
            why,
        )
        for outlines in self._seen.values():
            for seen in outlines.values():
                seen.distrust(family)

    def _sizes_of(self, key: CallKey) -> CallSizes:
        if self._latest is None or self._latest[0] != key:
            self._latest = key, CallSizes.of(key, self._alignment)
        return self._latest[1]

    def _seen_sizes(self, block: str, sizes: CallSizes) -> SeenSizes:
        outlines = self._seen.setdefault(block, OrderedDict())
        seen = outlines.get(sizes.outline) or SeenSizes()
        note_latest(outlines, sizes.outline, seen, MOST_OUTLINES)
        return seen

    def _family(self, records: Sequence[RecordedCall]) -> SymbolicTape | None:
        """The family of `records`, one for all blocks that recorded the same."""
        key = identity_of(records)
        family = self._families.get(key)
        if family is None:
            family = SymbolicTape.of(records)
            if family is not None:
                family.refuse(self._refused.get(family.base.structure, ()))
                self._families[key] = family
        return family

    def forget(self, kind: str, key: CallKey) -> None:
        """Forget the tape of calls with this key under plans for `kind`, since a call ran otherwise."""
        for known in list(self._of_calls):
            if known[:2] == (_structure(kind), key):
                self._of_calls.pop(known, None)

    def expected(self, kind: str, key: CallKey, block: str) -> Tape | None:
        """Return the tape that `block`, with a plan for `kind`, probably runs in a call with this key.

        It is the tape that the block ran in a profile, or else the tape of another such block: numbers may differ from
        layer to layer.
        """
        known = (self._of_calls.get((_structure(kind), key, name)) for name in (block, None))
        return next((tape for tape in known if tape is not None), None)

    def take(self, other: TapeCache) -> None:
        """Know and keep what `other` knows."""
        self._kept |= other._tapes
        self._tapes.update(other._tapes)
        self._of_calls.update(other._of_calls)
        self._orders.update(other._orders)
        self.preliminary |= other.preliminary
        self.untraceable.update(other.untraceable)
        for structure, values in other._refused.items():
            self._refused.setdefault(structure, set()).update(values)
        self._alignment, self._latest = max(self._alignment, other._alignment), None
        # Families are made anew: what is found out of one, as it is followed here, is no affair of others.
        for block, outlines in other._seen.items():
            mine = self._seen.setdefault(block, OrderedDict())
            for outline, seen in outlines.items():
                mine.setdefault(outline, SeenSizes()).take(seen, self._family)

    def tape_of_structure(self, structure: str) -> Tape | None:
        """Some tape of a kind that a plan was made for, if any block has recorded one."""
        return next((tape for tape in self._tapes.values() if tape.structure.startswith(structure)), None)

    def compiled(self, tape: Tape, choices: dict[int, Choice], shared: frozenset[int]) -> ExecutionPlan:
        # Codecs stand in no program: a plan with other outlier channels, say, runs the same one.
        actions = tuple(sorted((value, choice.action) for value, choice in choices.items()))
        equal = tuple(tape.equal.items())  # a family's tape has fewer than the one that it was first recorded as
        return self._once((tape.digest, (actions, shared, equal)), lambda: ExecutionPlan(tape, choices, shared))

    def resized(self, plan: ExecutionPlan, tape: Tape) -> ExecutionPlan:
        """`plan`, on a tape of the same family."""
        return self._once((tape.digest, plan), lambda: plan.resized(tape))

    def _once(self, key: Hashable, make: Callable[[], ExecutionPlan]) -> ExecutionPlan:
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = make()
        return compiled

    def warn_untrusted(self, name: str, tape: Tape) -> None:
        """Say once per kind that its blocks run plainly or under torch's checkpoint."""
        self._warn_once(
            tape,
            "Adacc: block %s and others like it are never replayed, but run plainly or checkpointed: %s",
            name,
            tape.untrusted,
        )

    def warn_varying(self, name: str, tape: Tape, why: str) -> None:
        """Say once per kind that operators vary from call to call."""
        self._warn_once(
            tape,
            "Adacc: block %s and others like it %s: their operators, or the numbers given to them, vary from call to "
            "call (%s)",
            name,
            _instead(tape),
            why,
        )

    def warn_unplanned(self, name: str, tape: Tape) -> None:
        """Say once that a shape has no plan, and what to do; of further kinds and shapes it is information."""
        sizes = _input_sizes(tape)
        others = (known for known in self._tapes.values() if known.block_class == tape.block_class)
        is_known_size = any(known is not tape and _input_sizes(known) == sizes for known in others)
        what = "run other operators than when profiled (recorded once, which takes what one block makes)"
        how = "with the least memory that is lossless for what differs"
        self._warn_other_path(tape.structure, name, sizes, what, how, _OTHER_MODE if is_known_size else _OTHER_SIZE)

    def warn_unrecorded(self, kind: str, name: str, given: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Say once that a path is not recorded for lack of memory, and what to do."""
        sizes = [tuple(tensor.shape) for _, tensor in given]
        what = "take a path that no profile has recorded (to record it would take more than memory_budget)"
        self._warn_other_path(f"unrecorded {kind}", name, sizes, what, "under torch's checkpoint")

    def _warn_other_path(
        self,
        sort: str,
        name: str,
        sizes: Iterable[tuple[int, ...]],
        what: str,
        how: str,
        cause: tuple[str, str] = _OTHER_SIZE,
    ) -> None:
        if sort in self._warned:
            return
        self._warned.add(sort)
        level, self._has_unplanned = logging.INFO if self._has_unplanned else logging.WARNING, True
        log.log(
            level,
            "Adacc: given %s, block %s and others like it %s, %s: such batches are trained %s; to have none, %s",
            ", ".join(map(str, sizes)),
            name,
            what,
            cause[0],
            how,
            cause[1],
        )

    def _warn_once(self, tape: Tape, message: str, *details: object) -> None:
        if tape.structure not in self._warned:
            self._warned.add(tape.structure)
            log.warning(message, *details)

    def learn_order(self, tape: Tape, asked: Iterable[int]) -> None:
        """Expect backward to ask for slots of `tape` as it has `asked` for them, if it never asked for more."""
        order = tuple(dict.fromkeys(asked))
        if len(order) <= len(tape.order or ()):
            return
        tape.order = order
        self._expect_order(tape.structure, order)
        for (digest, _), compiled in self._compiled.items():
            if digest == tape.digest:
                compiled.follow(tape.order)

    def _expect_order(self, kind: str, order: tuple[int, ...]) -> None:
        """Expect backward to ask for slots of a new tape of that kind or structure in `order`, unless it asked for
        more."""
        structure = _structure(kind)
        self._orders[structure] = max(self._orders.get(structure, ()), order, key=len)


def _input_sizes(tape: Tape) -> list[tuple[int, ...]]:
    return [value.ref.geometry[0] for value in tape.values if tape.is_block_input(value.index)]


def _structure(kind: str) -> str:
    """Return the part of a kind that is equal for all sizes of blocks that run the same operators."""
    return kind.partition("-")[0][:24]


_OF_PROFILES: WeakKeyDictionary[nn.Module, TapeCache] = WeakKeyDictionary()


def library_of_profiles(model: nn.Module) -> TapeCache:
    """The tapes that profiles of `model` have recorded; they are forgotten with the model.

    A policy's first calls are compared with them. To record and verify anew takes the memory of all that a block makes,
    twice: more than the policy's budget may have.
    """
    return _OF_PROFILES.setdefault(model, TapeCache())


def _instead(tape: Tape) -> str:
    """Describe how a block runs whose operators vary. Collectives must not run again (rule R13)."""
    return "retain everything" if tape.has_collectives else "are run under torch's checkpoint"


@contextmanager
def _autocast_off(tape: Tape) -> Iterator[None]:
    """While open, no value of `tape` is cast: a block on a GPU may have numbers on the CPU too (random seeds)."""
    with ExitStack() as stack:
        for device_type in {value.device.type for value in tape.values}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
