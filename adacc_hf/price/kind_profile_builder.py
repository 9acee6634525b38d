"""Profiles of kinds of blocks: the activations of a block, and the actions that a policy may choose for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.kind_profile import WHOLE, BackwardEvent, ForwardEvent, KindProfile, Operator, Value
from adacc_hf.artifacts.policy import BlockAction, Place
from adacc_hf.price.codec_selection import role_of, storable_values, with_outliers
from adacc_hf.price.measurement import Prices
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.operator_effects import CHANGED_UNSEEN
from adacc_hf.tape.replay_check import is_reproducible, obtainable_values
from adacc_hf.tape.tape import TapeOperator


class KindProfileBuilder:
    """Builder of the profile of one kind of block from its recorded blocks, without memory events."""

    def __init__(
        self, group: Sequence[RecordedBlock], shared_tensors: SharedTensors, prices: Prices, config: AdaccConfig
    ) -> None:
        self.group, self.shared_tensors, self.prices, self.config = group, shared_tensors, prices, config
        self.block = block = group[0]
        self.tape = tape = block.tape
        self.saved_values = set(block.saved_values())
        self.shared_records = {
            value: shared_tensors.record_index(tensor) for value, tensor in block.input_tensors.items()
        }
        cached_casts = {value: cast for value, cast in block.casts.items() if shared_tensors.is_shared_cast(cast)}
        self.counted_elsewhere = {
            value for value, cast in cached_casts.items() if not shared_tensors.owns_cast(block, cast)
        }
        self.held_values = cached_casts.keys() | block.externally_held
        self.held_values |= {value for value, note in block.outputs.items() if shared_tensors.is_shared_output(note)}
        input_values = {value.index for value in tape.values if tape.is_block_input(value.index)}
        own_values = {value for value in storable_values(tape) if self.shared_records.get(value) is None}
        self.activations = own_values & (self.saved_values | input_values)
        """Values that the block may store for backward, without those that autograd frees before."""
        self.optional = self.activations - self.held_values
        """Activations that a policy may compress or recompute. Values that code outside the block holds, such as an
        output or autocast's cast, are left out: they are always live, so storing them takes no additional memory."""
        self.recomputable = obtainable_values(tape, tape.recomputable, self.saved_values) - self.held_values
        self.decisions = tape.decisions()

    def build(self) -> KindProfile:
        """Return the profile of the kind of block, without the memory of forward and backward."""
        tape = self.tape
        return KindProfile(
            digest=tape.kind,
            block_class=tape.block_class,
            values=tuple(self._value(index) for index in range(len(tape.values))),
            operators=tuple(self._operator(index) for index in range(len(tape.operators))),
            slots=tuple(
                -1 if slot in self.block.dead_slots or tape.is_held_elsewhere(ref.value) else ref.value
                for slot, ref in enumerate(tape.slots)
            ),
            copied_slots=tuple(sorted(tape.function_slots)),
            forward=(),
            backward=(),
            # Replay multiplies by a dropout's mask in an operator of its own, which forward does not run.
            forward_ms=sum(
                ms
                for operator, ms in zip(tape.operators, self.prices.operator_ms, strict=True)
                if operator.short_name != "native_dropout_backward"
            ),
            given=_shared_arguments(self.block, self.shared_tensors),
            block_actions=_block_actions(self.group),
            elsewhere_bytes=sum(tape.values[value].nbytes for value in self.counted_elsewhere),
            generator_bytes=_generator_bytes(self.block),
        )

    def _value(self, index: int) -> Value:
        tape, record = self.tape, self.tape.values[index]
        options = self.prices.codecs.get(index, ()) if index in self.optional else ()
        names = (option.codec for option in options)
        errors = {name: max(each.errors.codecs.get((index, name), 0.0) for each in self.group) for name in names}
        too_coarse = {codec: error for codec, error in errors.items() if error > DEGRADED_ERROR}
        codecs = tuple(option for option in options if option.codec not in too_coarse)
        num_outliers = max(block.outliers.get(index, 0) for block in self.group)
        return Value(
            index=index,
            name=record.name,
            shape=record.ref.geometry[0],
            encoded_shape=encode_view(tape, index).geometry[0],
            dtype=str(record.ref.dtype).removeprefix("torch."),
            nbytes=0 if index in self.counted_elsewhere else record.nbytes,
            producer=record.producer,
            saved=index in self.saved_values,
            cached=index in self.block.externally_held,
            activation=index in self.activations,
            is_kept=index in self.held_values,
            shared=self.shared_records.get(index),
            recomputable=index in self.recomputable,
            role=role_of(tape, index),
            codecs=with_outliers(codecs, tape, index, num_outliers) if codecs else (),
            equal_to=self._equal_to(index),
            replay_error=max(block.errors.replay.get(index, 0.0) for block in self.group),
            taken_after=record.source.path[0] if record.source and tape.is_generator_state(index) else 0,
            too_coarse=tuple(too_coarse.items()),
            place=self._place(index),
            is_movable=self._is_movable(index),
            is_decision=index in self.decisions,
        )

    def _is_movable(self, index: int) -> bool:
        """Return True if the value may be stored in host memory. Small values and parameters stay on the device."""
        record = self.tape.values[index]
        is_large = record.nbytes >= self.config.min_compress_bytes and record.nbytes > 0
        is_own = role_of(self.tape, index) not in ("parameter", "generator")
        return index in self.optional and is_large and is_own and record.is_encodable

    def _place(self, index: int) -> Place:
        """Return the place of the value among a call's arguments, or () if a codec cannot encode it there."""
        record = self.tape.values[index]
        if not self.tape.is_block_input(index) or not record.is_encodable or record.source is None:
            return ()
        size = record.ref.geometry[0]
        keeps_order = encode_view(self.tape, index).geometry[0] == size
        return record.source.path if keeps_order and len(record.source.path) == 1 else ()

    def _equal_to(self, index: int) -> int | None:
        """Return the earlier activation with equal bits that replay reads (as `ExecutionPlan`), or None."""
        equal_value = self.tape.equal.get(index)
        may_be_left_out = index in self.recomputable and (
            index in self.optional or index not in self.tape.saved_values()
        )
        return equal_value if may_be_left_out and equal_value in self.activations else None

    def _operator(self, index: int) -> Operator:
        operator = self.tape.operators[index]
        return Operator(
            index=index,
            name=operator.name,
            module=operator.module,
            inputs=tuple(value for value in operator.inputs() if not self.tape.is_module_state(value)),
            outputs=tuple(operator.results()),
            ms=self.prices.operator_ms[index],
            replayable=not self.recomputable.isdisjoint(operator.results()),
            extra_bytes=self.prices.operator_bytes[index] - self._reused_bytes(operator),
        )

    def _reused_bytes(self, operator: TapeOperator) -> int:
        """Return the bytes of inputs that `operator` overwrites in replay, because no other operator reads them."""
        return sum(
            self.tape.values[old].nbytes
            for old, _ in operator.mutations
            if old not in self.activations
            and self.tape.values[old].source is None
            and not any(old in other.inputs() for other in self.tape.operators if other is not operator)
        )


def _block_actions(group: Sequence[RecordedBlock]) -> tuple[BlockAction, ...]:
    """Return the actions allowed for a whole block. A checkpoint must repeat all operators bit by bit (rule R7)."""
    tape = group[0].tape
    if tape.untrusted is None:
        is_checkpointable = not tape.has_collectives and is_reproducible(tape)
    else:  # if no operators are verified, only Dynamo stops at the block
        is_reproduced = not tape.verified or is_reproducible(tape)
        # A traced graph, or a second run that ends at the last saved tensor, would omit changes that autograd misses.
        is_reproduced = is_reproduced and tape.untrusted != CHANGED_UNSEEN
        is_checkpointable = is_reproduced and not any(block.changes_state for block in group)
    if not is_checkpointable:
        return (BlockAction.PLAIN,)
    return (BlockAction.CHECKPOINT,) if tape.has_collectives else (BlockAction.PLAIN, BlockAction.CHECKPOINT)


def _shared_arguments(block: RecordedBlock, shared_tensors: SharedTensors) -> tuple[int, ...]:
    """Return the shared tensors among a call's arguments, as indices in `SharedTensors.records`."""
    records = {shared_tensors.record_index(tensor) for tensor in block.argument_tensors.values()}
    return tuple(sorted(index for index in records if index is not None))


def _generator_bytes(block: RecordedBlock) -> int:
    """Return the bytes of generator state that torch's checkpoint stores on the block's device, 0 on a GPU."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in block.argument_tensors.values())
    return torch.get_rng_state().nbytes if on_cpu else 0


# Kinds of blocks whose operators cannot be replayed.

SAVED = 0
"""Index of the profiled value that represents all saved tensors of a block."""


def untrusted_kind(group: Sequence[RecordedBlock], shared_tensors: SharedTensors, forward_ms: float) -> KindProfile:
    """Return the profile of blocks whose operators cannot be replayed, without the memory of forward and backward.

    The blocks in `group` may save different numbers of bytes, because the tokens of an expert vary. The largest counts.
    """
    block = group[0]
    has_slots = bool(block.tape.slots)
    most_bytes = max(saved_bytes(each, shared_tensors) for each in group)
    whole = _value_of_bytes(SAVED, "all that the block saves", most_bytes, WHOLE, None)
    arguments = [
        _value_of_bytes(index, "an argument of the block", tensor.nbytes, "input", shared_tensors.record_index(tensor))
        for index, tensor in enumerate(block.argument_tensors.values(), start=SAVED + 1)
    ]
    return KindProfile(
        digest=block.tape.kind,
        block_class=block.tape.block_class,
        values=(replace(whole, saved=has_slots, activation=has_slots), *arguments),
        operators=(),
        slots=(SAVED,) if has_slots else (),
        forward=(),
        backward=(),
        forward_ms=forward_ms,
        given=_shared_arguments(block, shared_tensors),
        untrusted=block.tape.untrusted,
        block_actions=_block_actions(group),
        generator_bytes=_generator_bytes(block),
    )


def with_untrusted_memory(kind: KindProfile, forward_bytes: int, backward_bytes: int | None) -> KindProfile:
    """Return a copy of `kind` whose forward needs `forward_bytes`, and at its end stores all saved tensors at once, and
    whose backward needs `backward_bytes` in addition to the saved tensors, or was not measured (None).

    `backward_bytes` were measured under torch's checkpoint, which runs the forward again, but may stop before its
    result. So the forward is limited to these bytes plus the result, assumed to be as large as the largest input.
    """
    end_bytes, backward = forward_bytes, kind.backward
    if backward_bytes is not None and kind.slots:
        end_bytes = min(end_bytes, backward_bytes + max((v.nbytes for v in kind.values[SAVED + 1 :]), default=0))
        backward = (
            BackwardEvent(slot=0, release=False, entry_bytes=backward_bytes, extra_bytes=backward_bytes),
            BackwardEvent(slot=0, release=True, entry_bytes=0, extra_bytes=0),
        )
    forward = (
        ForwardEvent(value=-1, death=False, extra_bytes=forward_bytes),
        ForwardEvent(value=SAVED, death=True, extra_bytes=end_bytes),
    )
    return replace(kind, forward=forward, backward=backward)


def saved_bytes(block: RecordedBlock, shared_tensors: SharedTensors) -> int:
    """Return the bytes of the tensors that only autograd keeps alive after a recorded block call."""
    tape = block.tape
    own_inputs = {v for v, tensor in block.input_tensors.items() if shared_tensors.record_index(tensor) is None}
    hidden_values = block.internal_storages.keys() - block.externally_held
    own_values = [
        v for v in block.saved_values() if v in own_inputs or v in hidden_values or tape.values[v].source is None
    ]
    return sum(tape.values[v].nbytes for v in own_values)


def _value_of_bytes(index: int, name: str, nbytes: int, role: str, shared: int | None) -> Value:
    """Return a profiled value of `nbytes` bytes that no recorded operator computes."""
    return Value(
        index=index,
        name=name,
        shape=(nbytes,),
        encoded_shape=(nbytes,),
        dtype="uint8",
        nbytes=nbytes,
        producer=None,
        saved=False,
        activation=shared is None,
        shared=shared,
        recomputable=False,
        role=role,
    )
