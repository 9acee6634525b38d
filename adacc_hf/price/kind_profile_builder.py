"""Builder of a block profile: the activations of a block, and the actions that a policy may choose for them."""

from __future__ import annotations

from collections.abc import Sequence

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.kind_profile import KindProfile, Operator, Value
from adacc_hf.artifacts.policy import BlockAction, Place
from adacc_hf.price.codec_selection import role_of, storable_values, with_outliers
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors
from adacc_hf.price.unreplayable_kinds import generator_bytes, shared_argument_records
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.replay_check import is_reproducible, obtainable_values
from adacc_hf.tape.tape import Tape, TapeOperator


class KindProfileBuilder:
    """Builder of the profile of one kind of block from its recorded blocks, without memory events."""

    def __init__(
        self, group: Sequence[RecordedBlock], shared_tensors: SharedTensors, prices: Prices, config: AdaccConfig
    ) -> None:
        block = group[0]
        self.tape = block.tape
        self.prices = prices
        self.config = config
        self.dead_slots = block.dead_slots
        self.saved_values = set(block.saved_values())
        self.externally_held = block.externally_held
        self.shared_records = {
            value: shared_tensors.record_index(tensor) for value, tensor in block.input_tensors.items()
        }
        held_values = {value for value, tensor in block.outputs.items() if shared_tensors.is_shared_output(tensor)}
        cached_casts = {value: cast for value, cast in block.casts.items() if shared_tensors.is_shared_cast(cast)}
        held_values |= cached_casts.keys() | block.externally_held
        self.counted_elsewhere = {
            value for value, cast in cached_casts.items() if not shared_tensors.owns_cast(block, cast)
        }
        input_values = {value.index for value in self.tape.values if self.tape.is_block_input(value.index)}
        own_values = {value for value in storable_values(self.tape) if self.shared_records.get(value) is None}
        self.activations = own_values & (self.saved_values | input_values)
        """Values that the block may store for backward, without those that autograd frees before."""
        self.held_values = held_values
        self.optional = self.activations - held_values
        """Activations that a policy may compress or recompute. Values that code outside the block holds, such as an
        output or autocast's cast, are left out: they are always live, so storing them takes no additional memory."""
        self.recomputable = obtainable_values(self.tape, self.tape.recomputable, self.saved_values) - held_values
        self.decisions = self.tape.decisions()
        self.block_actions = _block_actions(self.tape)
        self.shared_arguments = shared_argument_records(block, shared_tensors)
        self.generator_bytes = generator_bytes(block)
        self.outliers = {value: max(block.outliers.get(value, 0) for block in group) for value in prices.codecs}
        self.errors = [block.errors for block in group]

    def build(self) -> KindProfile:
        """Return the profile of the kind of block, without the memory of forward and backward."""
        tape = self.tape
        return KindProfile(
            digest=tape.kind,
            block_class=tape.block_class,
            values=tuple(self._value(index) for index in range(len(tape.values))),
            operators=tuple(self._operator(index) for index in range(len(tape.operators))),
            slots=tuple(
                -1 if slot in self.dead_slots or tape.is_held_elsewhere(ref.value) else ref.value
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
            given=self.shared_arguments,
            block_actions=self.block_actions,
            elsewhere_bytes=sum(tape.values[value].nbytes for value in self.counted_elsewhere),
            generator_bytes=self.generator_bytes,
        )

    def _value(self, index: int) -> Value:
        tape, record = self.tape, self.tape.values[index]
        options = self.prices.codecs.get(index, ()) if index in self.optional else ()
        names = (option.codec for option in options)
        errors = {name: max(each.codecs.get((index, name), 0.0) for each in self.errors) for name in names}
        too_coarse = {codec: error for codec, error in errors.items() if error > DEGRADED_ERROR}
        codecs = tuple(option for option in options if option.codec not in too_coarse)
        return Value(
            index=index,
            name=record.name,
            shape=record.ref.geometry[0],
            encoded_shape=encode_view(tape, index).geometry[0],
            dtype=str(record.ref.dtype).removeprefix("torch."),
            nbytes=0 if index in self.counted_elsewhere else record.nbytes,
            producer=record.producer,
            saved=index in self.saved_values,
            cached=index in self.externally_held,
            activation=index in self.activations,
            is_kept=index in self.held_values,
            shared=self.shared_records.get(index),
            recomputable=index in self.recomputable,
            role=role_of(tape, index),
            codecs=with_outliers(codecs, tape, index, self.outliers[index]) if codecs else (),
            replay_error=max(errors.replay.get(index, 0.0) for errors in self.errors),
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


def _block_actions(tape: Tape) -> tuple[BlockAction, ...]:
    """Return the actions allowed for a whole block. A checkpoint must repeat all operators bit by bit (rule R7)."""
    is_checkpointable = not tape.has_collectives and is_reproducible(tape)
    return (BlockAction.PLAIN, BlockAction.CHECKPOINT) if is_checkpointable else (BlockAction.PLAIN,)
