"""From recorded blocks to the profile of their kind: which values are activations, and what may be done with each."""

from __future__ import annotations

from collections.abc import Sequence

from adacc_hf.config import AdaccConfig
from adacc_hf.decisions import SPOILED_ERROR
from adacc_hf.profile import KindProfile, Operator, Value
from adacc_hf.profiling.codec_options import storable, with_outliers
from adacc_hf.profiling.pricing import Prices
from adacc_hf.profiling.roles import role_of
from adacc_hf.profiling.sharing import RecordedBlock, Sharing
from adacc_hf.tapes.compiled import encode_view
from adacc_hf.tapes.verification import obtainable


class KindBuilder:
    """Builds the profile of blocks with equal tapes that share alike; its memory is still to be measured."""

    def __init__(self, group: Sequence[RecordedBlock], sharing: Sharing, prices: Prices, config: AdaccConfig) -> None:
        block = group[0]
        self.tape = block.tape
        self.prices = prices
        self.config = config
        self.dead = block.dead
        self.saved = set(block.saved())
        self.held_besides = block.held_besides
        self.shared = {value: sharing.index_of(tensor) for value, tensor in block.arguments.items()}
        kept = {value for value, tensor in block.outputs.items() if sharing.is_kept(tensor)}
        cached = {value: cast for value, cast in block.casts.items() if sharing.is_cached(cast)}
        kept |= cached.keys() | block.held_besides
        self.counted_elsewhere = {value for value, cast in cached.items() if not sharing.is_owner(block, cast)}
        inputs = {value.index for value in self.tape.values if self.tape.is_block_input(value.index)}
        own = {value for value in storable(self.tape) if self.shared.get(value) is None}
        self.activations = own & (self.saved | inputs)
        """What the block may store: dead slots store nothing."""
        self.optional = self.activations - kept
        """What it may also not store; an output, a cast or anything else that others hold costs nothing more."""
        self.recomputable = obtainable(self.tape, self.tape.recomputable, self.saved) - kept
        self.outliers = {value: max(block.outliers.get(value, 0) for block in group) for value in prices.codecs}
        self.errors = [block.errors for block in group]

    def build(self) -> KindProfile:
        """The profile."""
        tape = self.tape
        return KindProfile(
            digest=tape.kind,
            block_class=tape.block_class,
            values=tuple(self._value(index) for index in range(len(tape.values))),
            operators=tuple(self._operator(index) for index in range(len(tape.operators))),
            slots=tuple(
                -1 if slot in self.dead or tape.is_held_elsewhere(ref.value) else ref.value
                for slot, ref in enumerate(tape.slots)
            ),
            forward=(),
            backward=(),
            forward_ms=sum(self.prices.operator_ms),
        )

    def _value(self, index: int) -> Value:
        tape, record = self.tape, self.tape.values[index]
        options = self.prices.codecs.get(index, ()) if index in self.optional else ()
        errors = {option.codec: self._gradient_error(index, option.codec) for option in options}
        too_coarse = {codec: error for codec, error in errors.items() if error > SPOILED_ERROR}
        codecs = tuple(option for option in options if option.codec not in too_coarse)
        return Value(
            index=index,
            name=record.name,
            shape=record.ref.geometry[0],
            encoded_shape=encode_view(tape, index).geometry[0],
            dtype=str(record.ref.dtype).removeprefix("torch."),
            nbytes=0 if index in self.counted_elsewhere else record.nbytes,
            producer=record.producer,
            saved=index in self.saved,
            cached=index in self.held_besides,
            activation=index in self.activations,
            shared=self.shared.get(index),
            recomputable=index in self.recomputable,
            role=role_of(tape, index),
            codecs=with_outliers(codecs, tape, index, self.config, self.outliers[index]) if codecs else (),
            equal_to=self._equal_to(index),
            replay_error=max(errors.replay.get(index, 0.0) for errors in self.errors),
            too_coarse=tuple(too_coarse.items()),
        )

    def _gradient_error(self, index: int, codec: str) -> float:
        """The largest that it makes in any block of the kind."""
        return max(errors.codecs.get((index, codec), 0.0) for errors in self.errors)

    def _equal_to(self, index: int) -> int | None:
        """The activation that stands for this value, as `CompiledPlan` has it."""
        twin = self.tape.equal.get(index)
        is_free = index in self.recomputable and (index in self.optional or index not in self.tape.saved_values())
        return twin if is_free and twin in self.activations else None

    def _operator(self, index: int) -> Operator:
        operator = self.tape.operators[index]
        return Operator(
            index=index,
            name=operator.name,
            module=operator.module,
            inputs=tuple(value for value in operator.inputs() if not self.tape.is_module_state(value)),
            outputs=tuple(operator.made()),
            ms=self.prices.operator_ms[index],
            replayable=not self.recomputable.isdisjoint(operator.made()),
            extra_bytes=self.prices.operator_bytes[index],
        )
