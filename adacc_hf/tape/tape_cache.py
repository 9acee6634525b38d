"""Cache of a model's tapes and of the execution plans built for these tapes."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.kind_profile import KindProfile, unpack_order
from adacc_hf.artifacts.policy import Choice
from adacc_hf.tape.execution_plan import ExecutionPlan
from adacc_hf.tape.guards import CallKey, Untraceable
from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.replay_check import equal_values, obtainable_values, verify
from adacc_hf.tape.symbolic_tape import (
    CallSizes,
    RecordedCall,
    SizeClassRecords,
    SymbolicTape,
    identity_of,
)
from adacc_hf.tape.tape import Tape

log = logging.getLogger(__name__)

MOST_SIZE_CLASSES = 16
"""Maximum number of size classes remembered for each block. Calls with and without a padding mask are two of them."""
CUDA_ALIGNMENT = 16
"""Alignment of masks on a GPU. Attention kernels need a mask whose last dimension is a multiple of this number. Extra
operators pad other masks."""


_OTHER_SIZE = (
    "for example in a smaller last batch, or one without padding",
    "set dataloader_drop_last=True or pad to one length. If the sizes vary by design, as those of generated texts in "
    "GRPO, nothing needs to be changed",
)
_OTHER_MODE = (
    "although a batch of these sizes was recorded: autocast, frozen weights, eval mode or the attention kernel changed",
    "profile and train in the same mode",
)
"""(likely cause, remedy) in the warning that a block runs operators for which its plan was not made.

This text is for batches of known sizes. `_OTHER_SIZE` is for batches of new sizes.
"""


class TapeCache:
    """Cache of a model's tapes, and of the execution plans built for these tapes.

    Blocks with equal tapes share one tape object. A tape is freed when all blocks have dropped the call keys that map
    to the tape. Tapes recorded by a profile stay alive (`profiled_tapes`). `is_partitioned` is True if ZeRO 3 divides
    the model's parameters among ranks.
    """

    def __init__(
        self,
        verify: Callable[[Tape, list[torch.Tensor]], frozenset[int]] = verify,
        is_partitioned: bool = False,
    ) -> None:
        self._verify = verify
        self._is_partitioned = is_partitioned
        self.tapes: WeakValueDictionary[str, Tape] = WeakValueDictionary()
        """Recorded tapes that are alive, by digest."""
        self.execution_plans: WeakValueDictionary[Any, ExecutionPlan] = WeakValueDictionary()
        """Execution plans that are alive, by (digest of the plan's tape, everything else that the plan depends on)."""
        self._of_calls: WeakValueDictionary[tuple[str, CallKey, str | None], Tape] = WeakValueDictionary()
        """Tapes by (digest of the operators, call key, block name). The entry with the name None is the tape of the
        block that ran last."""
        self.profiled: dict[str, Tape] = {}
        """Tapes taken over from other caches, by digest. This dict keeps the tapes alive."""
        self.records: dict[str, OrderedDict[Hashable, SizeClassRecords]] = {}
        """Recorded calls, by block name and by size class."""
        self.symbolic_tapes: WeakValueDictionary[Hashable, SymbolicTape] = WeakValueDictionary()
        """Symbolic tapes that are alive, by the key of their records (`identity_of`)."""
        self._alignment = 1
        """Multiples of this number and other sizes have separate symbolic tapes (`CallSizes.of`), because a GPU runs
        different operators for them."""
        self._orders: dict[str, tuple[int, ...]] = {}
        """Order in which backward unpacks saved tensors, by `Tape.structure`. It does not depend on sizes."""
        self.has_profile = False
        """True if the plans were made for a profile of this run, whose model may run other operators by now."""
        self.untraceable: Untraceable = OrderedDict()
        """Calls of the model's blocks that Dynamo cannot trace."""
        self.fallbacks: dict[str, Counter[str]] = {}
        """Numbers of the calls that did not follow their plan, by reason and block. The code that counts steps clears
        this dict."""
        self._warned: set[str] = set()
        self._has_unplanned = False

    def verified_tape(self, recorder: Recorder) -> Tape:
        """Return the tape that `recorder` recorded, with the values that replay recomputes bit for bit
        (`Tape.recomputable`).

        Only the first tape of each digest is verified, and returned for later tapes with the same digest. A tape that
        must not be used (`Tape.untrusted`) is not verified.
        """
        tape = recorder.tape()
        cached_tape = self.tapes.get(tape.digest)
        if cached_tape is not None:
            return cached_tape
        if tape.untrusted is None:
            with torch.no_grad(), autocast_off(tape):
                tape.verified = self._verify(tape, recorder.bases)
                tape.checksums = {}
                tape.recomputable = obtainable_values(tape, tape.verified - tape.decisions(), tape.saved_values())
                tape.equal = equal_values(tape, tape.recomputable)
            self._warn_stored(recorder, tape)
        tape.order = self._orders.get(_tape_structure(tape.structure))
        self.tapes[tape.digest] = tape
        return tape

    def _warn_stored(self, recorder: Recorder, tape: Tape) -> None:
        """Warn once for each `autograd.Function` whose results cannot be recomputed, with the reason."""
        reasons = dict(recorder.refusal_reasons)
        for operator in tape.operators:
            is_stored = operator.is_function and not tape.verified.issuperset(operator.results())
            if is_stored and operator.target.may_run_again:
                reasons[operator.name.partition(".")[2]] = "gives different bits when it runs again"
        for name, reason in reasons.items():
            text = "Adacc: block %s: results of the autograd.Function %s are stored, not recomputed: the Function %s"
            self.warn_once(name, text, tape.block_class, name, reason)

    def expect_orders(self, kinds: Iterable[KindProfile]) -> None:
        """Expect backward to unpack saved tensors in the order observed when the `kinds` were profiled."""
        self.has_profile = True
        for kind in kinds:
            if kind.untrusted is None:
                self._expect_order(kind.digest, unpack_order(kind.backward))

    def expect_same_orders(self, other: TapeCache) -> None:
        """Expect backward to unpack saved tensors in the orders that the cache `other` has recorded."""
        self._orders.update(other._orders)

    def remember(self, tape: Tape, key: CallKey, block: str) -> None:
        """Record that a call of `block` with this key ran the operators of `tape`, to predict other sizes too."""
        for name in (block, None):
            self._of_calls[_tape_structure(tape.kind), key, name] = tape
        if any(value.device.type == "cuda" for value in tape.values):
            self._alignment = CUDA_ALIGNMENT
        records, sizes = self._records_of(block, key)
        records.add(RecordedCall(sizes, tape))

    def symbolic_tape_at(self, key: CallKey, block: str) -> tuple[SymbolicTape, CallSizes] | None:
        """Return (symbolic tape, sizes) for a call of `block` with this key, or None if no symbolic tape is fitted to
        calls that differ from this call only in sizes."""
        records, sizes = self._records_of(block, key)
        symbolic_tape = records.active_symbolic_tape()
        return None if symbolic_tape is None else (symbolic_tape, sizes)

    def extend(self, symbolic_tape: SymbolicTape, key: CallKey) -> None:
        """Extend the range of sizes of `symbolic_tape` to those of a call with `key`, which ran its operators."""
        symbolic_tape.extend(CallSizes.of(key, self._alignment))

    def tape_of(self, symbolic_tape: SymbolicTape, sizes: CallSizes) -> Tape | None:
        """Return the tape of `symbolic_tape` at these sizes, or None if its polynomials are not valid there."""
        return symbolic_tape.tape_at(sizes, self._orders.get(_tape_structure(symbolic_tape.base.structure)))

    def untrusted_at(self, key: CallKey, block: str) -> Tape | None:
        """Return an untrusted tape of `block` if calls with this `key` were recorded at two or more sizes, and none of
        their tapes can be replayed. Return None otherwise."""
        return self._records_of(block, key)[0].untrusted

    def distrust(self, symbolic_tape: SymbolicTape, block: str) -> None:
        """Discard `symbolic_tape`, whose numbers are wrong at some size. From now on, each new size is recorded."""
        log.warning(
            "Adacc: block %s runs other operators at some sizes of a batch than at others (their numbers follow no "
            "polynomial): each new size is recorded from now on, which takes time; to avoid this, pad batches to few "
            "lengths (pad_to_multiple_of)",
            block,
        )
        for by_size_class in self.records.values():
            for size_class_records in by_size_class.values():
                size_class_records.distrust(symbolic_tape)

    def _records_of(self, block: str, key: CallKey) -> tuple[SizeClassRecords, CallSizes]:
        """Return (records of the size class of a call of `block` with this key, sizes of the call)."""
        sizes = CallSizes.of(key, self._alignment)
        by_size_class = self.records.setdefault(block, OrderedDict())
        size_class_records = by_size_class.get(sizes.size_class) or SizeClassRecords(self._symbolic_tape_of)
        put_latest(by_size_class, sizes.size_class, size_class_records, MOST_SIZE_CLASSES)
        return size_class_records, sizes

    def _symbolic_tape_of(self, records: Sequence[RecordedCall]) -> SymbolicTape | None:
        """Return the symbolic tape fitted to `records`, shared by blocks with equal records. None if nothing fits."""
        key = identity_of(records)
        symbolic_tape = self.symbolic_tapes.get(key)
        if symbolic_tape is None:
            symbolic_tape = SymbolicTape.of(records)
            if symbolic_tape is not None:
                self.symbolic_tapes[key] = symbolic_tape
        return symbolic_tape

    def expected_tape(self, kind: str, key: CallKey, block: str) -> Tape | None:
        """Return the tape that a call of `block`, whose plan is for blocks of `kind`, is expected to follow.

        This is the tape of the block's own call with this key, for example in a profile, or of the block of the kind
        that ran last with this key, or None. Numbers on the tape of another block may differ, because layers may
        differ.
        """
        candidates = (self._of_calls.get((_tape_structure(kind), key, name)) for name in (block, None))
        return next((tape for tape in candidates if tape is not None), None)

    def take(self, other: TapeCache) -> None:
        """Merge the cache `other` into this cache, which then keeps the tapes of `other` alive."""
        self.profiled |= other.tapes
        self.tapes.update(other.tapes)
        self._of_calls.update(other._of_calls)
        self._orders.update(other._orders)
        self.untraceable.update(other.untraceable)
        self._alignment = max(self._alignment, other._alignment)
        # Fit the symbolic tapes again: later findings about one in this cache must not affect `other`.
        for block, by_size_class in other.records.items():
            own_records = self.records.setdefault(block, OrderedDict())
            for size_class, records in by_size_class.items():
                own_records.setdefault(size_class, SizeClassRecords(self._symbolic_tape_of)).take(records)

    def tapes_of_kind(self, kind: str) -> list[Tape]:
        """Return the recorded tapes, of any size, that have the operators of blocks of `kind`."""
        structure = _tape_structure(kind)
        return [tape for tape in self.tapes.values() if _tape_structure(tape.structure) == structure]

    def execution_plan(self, tape: Tape, choices: dict[int, Choice], shared: frozenset[int]) -> ExecutionPlan:
        """Return the execution plan of `choices` for `tape`. `shared` are inputs that code outside the block keeps."""
        # Execution plans do not contain codecs: plans that differ only in outlier channels, say, share one.
        actions = tuple(sorted((value, choice.action) for value, choice in choices.items()))
        key = tape.digest, (actions, shared)
        plan = self.execution_plans.get(key)
        if plan is None:
            plan = self.execution_plans[key] = ExecutionPlan(tape, choices, shared, self._is_partitioned)
        return plan

    def note_fallback(self, reason: str | None, block: str) -> None:
        """Count one call of `block` that did not follow its plan because of `reason`, if any."""
        if reason is not None:
            self.fallbacks.setdefault(reason, Counter())[block] += 1

    def warn_not_replayed(self, name: str, topic: str, reason: str | None) -> None:
        """Warn, once for each `topic`, that blocks such as `name` are not replayed because of `reason`."""
        message = "Adacc: block %s and others of its kind are not replayed, but run plainly or checkpointed: %s"
        self.warn_once(topic, message, name, reason)

    def warn_once(self, topic: str, text: str, *details: Any) -> None:
        """Log the warning `text`, a %-format for `details`, once for each `topic`."""
        if topic not in self._warned:
            self._warned.add(topic)
            log.warning(text, *details)

    def warn_unplanned(self, name: str, tape: Tape) -> None:
        """Warn that the block `name` runs operators for which its plan was not made, and how to avoid this: the first
        time at level WARNING, for further kinds of blocks and shapes at level INFO."""
        sizes = _input_sizes(tape)
        others = (cached_tape for cached_tape in self.tapes.values() if cached_tape.block_class == tape.block_class)
        is_known_size = any(cached_tape is not tape and _input_sizes(cached_tape) == sizes for cached_tape in others)
        why, cure = _OTHER_MODE if is_known_size else _OTHER_SIZE
        if tape.structure in self._warned:
            return
        self._warned.add(tape.structure)
        level, self._has_unplanned = logging.INFO if self._has_unplanned else logging.WARNING, True
        log.log(
            level,
            "Adacc: for inputs of shape %s, block %s and others of its kind run other operators than when profiled "
            "(recorded once), %s: these batches train exactly, with the least memory for the values that differ; to "
            "avoid this, %s",
            ", ".join(map(str, sizes)),
            name,
            why,
            cure,
        )

    def learn_order(self, tape: Tape, unpacked_slots: Iterable[int]) -> None:
        """Schedule replay of `tape` for the order in which a backward unpacked the saved tensors `unpacked_slots`,
        unless an order with at least as many saved tensors is known."""
        order = tuple(dict.fromkeys(unpacked_slots))
        if len(order) <= len(tape.order or ()):
            return
        tape.order = order
        self._expect_order(tape.structure, order)
        for (digest, _), execution_plan in self.execution_plans.items():
            if digest == tape.digest:
                execution_plan.follow(tape.order)

    def _expect_order(self, kind: str, order: tuple[int, ...]) -> None:
        """Record the order in which saved tensors are unpacked, for new tapes of `kind`. The longest order is kept."""
        structure = _tape_structure(kind)
        self._orders[structure] = max(self._orders.get(structure, ()), order, key=len)


def _input_sizes(tape: Tape) -> list[tuple[int, ...]]:
    return [value.ref.geometry[0] for value in tape.values if tape.is_block_input(value.index)]


def _tape_structure(kind: str) -> str:
    """Return the first part of `kind` (`Tape.kind`): the digest of a tape's operators without sizes."""
    return kind.partition("-")[0][:24]


_OF_PROFILES: WeakKeyDictionary[nn.Module, TapeCache] = WeakKeyDictionary()


def profiled_tapes(model: nn.Module) -> TapeCache:
    """Return the cache of the tapes that profiles of `model` have recorded, which is freed with the model.

    A policy's first calls are compared with these tapes. Recording and verifying a call again would take twice the
    memory of all intermediates of a block, for which the policy's budget may have no room.
    """
    return _OF_PROFILES.setdefault(model, TapeCache())


@contextmanager
def autocast_off(tape: Tape) -> Iterator[None]:
    """Disable autocast inside the `with` block, for all devices of values on `tape`."""
    with ExitStack() as stack:
        for device_type in {value.device.type for value in tape.values}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
