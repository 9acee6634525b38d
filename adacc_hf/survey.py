"""The survey of a model: every block recorded in one forward, grouped into kinds, with prices and what is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from adacc_hf.blocks import Installation
from adacc_hf.call_inputs import StatePaths, call_key
from adacc_hf.compiled import encode_view
from adacc_hf.config import AdaccConfig
from adacc_hf.executor import FollowPlan
from adacc_hf.instruments import Instruments
from adacc_hf.memory import forward_loss
from adacc_hf.policy import RECOMPUTE, RETAIN, Plan
from adacc_hf.pricing import Prices, role_of, storable, with_outliers
from adacc_hf.profile import ForwardEvent, KindProfile, Operator, Shared, Value
from adacc_hf.recorder import argument_tensors
from adacc_hf.recording import Recording
from adacc_hf.simulator import BlockOutcome, run_block
from adacc_hf.step_memory import WatchSlots
from adacc_hf.tape import Tape
from adacc_hf.tape_library import TapeLibrary


@dataclass
class RecordedBlock:
    """What one block's recorded call tells."""

    name: str
    key: Any
    tape: Tape
    arguments: dict[int, torch.Tensor]
    """The recorded argument of each input value; holds the storage so that its address stays its own."""
    outliers: dict[int, int]
    kind: int = -1


class RecordBlock:
    """The strategy that records one call; the block's saved tensors are let go, since no backward follows."""

    expects_outer_hooks = True

    def __init__(self, name: str, survey: Survey) -> None:
        self.name = name
        self.survey = survey

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording = Recording(self.name, block, args, kwargs, self.survey.instruments.drawing)
        result = recording.run(fn)
        key = call_key(block, StatePaths(block), args, kwargs)
        self.survey.add(self.name, key, recording)
        recording.discard()
        return result


class Survey:
    """All blocks' tapes, what they share with each other and with the rest of the model, and the prices."""

    def __init__(self, config: AdaccConfig, instruments: Instruments) -> None:
        self.config = config
        self.instruments = instruments
        self.library = TapeLibrary(instruments.verify)
        self.blocks: list[RecordedBlock] = []
        self._prices: dict[str, Prices] = {}
        self._outside: dict[int, torch.Tensor] = {}
        self._state: set[int] = set()
        self._batch: set[int] = set()
        self._shared: list[tuple[torch.Tensor, str, bool]] = []
        self._kinds: list[KindProfile] = []
        self._own_inputs: list[frozenset[int]] = []

    def record(self, model: nn.Module, batch: Mapping[str, Any], installation: Installation) -> None:
        """Run one forward, recording every block and what the rest of the model saves."""
        for name, function in installation.functions.items():
            function.strategy = RecordBlock(name, self)
        self._state = {_address(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._batch = {_address(tensor) for _, tensor in argument_tensors((), dict(batch))}
        torch.clear_autocast_cache()
        with torch.autograd.graph.saved_tensors_hooks(self._save_outside, _refuse_backward):
            forward_loss(model, batch)
        self._find_shared()

    def add(self, name: str, key: Any, recording: Recording) -> None:
        """Keep one block's tape, and take the prices if no tape like it came before."""
        recorder = recording.recorder
        tape = self.library.verified(recorder)
        outliers = self.instruments.outliers(tape, recorder.bases, self.config)
        inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
        arguments = {value: recorder.bases[value] for value in inputs}
        self.blocks.append(RecordedBlock(name, key, tape, arguments, outliers))
        if tape.digest not in self._prices:
            self._prices[tape.digest] = self.instruments.price(tape, recorder.bases, self.config, outliers)

    def _save_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        self._outside.setdefault(_address(kept), kept)
        return kept

    def _find_shared(self) -> None:
        """Tell inputs that belong to one block from those that others hold too."""
        owners: dict[int, set[str]] = {}
        for block in self.blocks:
            for tensor in block.arguments.values():
                owners.setdefault(_address(tensor), set()).add(block.name)
        held_elsewhere = self._outside.keys() | self._state | self._batch
        self._shared_addresses = {a for a, names in owners.items() if len(names) > 1 or a in held_elsewhere}
        saved = {
            _address(block.arguments[value])
            for block in self.blocks
            for value in block.tape.saved_values()
            if value in block.arguments
        }
        found: dict[int, tuple[torch.Tensor, str, bool]] = {}
        for block in self.blocks:
            for value, tensor in block.arguments.items():
                address = _address(tensor)
                if address in self._shared_addresses:
                    is_saved = address in saved or address in self._outside
                    found.setdefault(address, (tensor, f"{block.name} {block.tape.values[value].name}", is_saved))
        self._shared = list(found.values())
        self._shared_index = {address: index for index, address in enumerate(found)}

    def shared_records(self) -> tuple[Shared, ...]:
        """The inputs that others hold too.

        What came with the batch, and a parameter or buffer of the model that a block is given (DeBERTa-v2's relative
        embeddings), takes nothing beyond static memory.
        """
        static = self._batch | self._state
        return tuple(
            Shared(name=name, nbytes=0 if _address(t) in static else t.untyped_storage().nbytes(), saved=saved)
            for t, name, saved in self._shared
        )

    def kinds(self) -> list[KindProfile]:
        """One profile per kind, its memory still to be measured; every block is told its kind."""
        groups: dict[Any, list[RecordedBlock]] = {}
        for block in self.blocks:
            groups.setdefault((block.tape.digest, self._sharing(block)), []).append(block)
        for index, group in enumerate(groups.values()):
            for block in group:
                block.kind = index
            self._kinds.append(self._kind(group))
        return self._kinds

    def _sharing(self, block: RecordedBlock) -> tuple[tuple[int, int | None], ...]:
        """Which inputs of a block are shared, and with which others."""
        return tuple((value, self._shared_index.get(_address(t))) for value, t in sorted(block.arguments.items()))

    def _kind(self, group: list[RecordedBlock]) -> KindProfile:
        tape = group[0].tape
        prices = self._prices[tape.digest]
        outliers = {value: max(block.outliers.get(value, 0) for block in group) for value in prices.codecs}
        shared = dict(self._sharing(group[0]))
        acted_on = set(storable(tape))
        values = tuple(
            self._value(tape, index, shared, acted_on, prices, outliers) for index in range(len(tape.values))
        )
        return KindProfile(
            digest=tape.kind,
            block_class=tape.block_class,
            values=values,
            operators=tuple(_operator(tape, index, ms) for index, ms in enumerate(prices.operator_ms)),
            slots=tuple(-1 if tape.is_held_elsewhere(slot.value) else slot.value for slot in tape.slots),
            forward=(),
            backward=(),
            forward_ms=sum(prices.operator_ms),
        )

    def _value(
        self,
        tape: Tape,
        index: int,
        shared: dict[int, int | None],
        acted_on: set[int],
        prices: Prices,
        outliers: dict[int, int],
    ) -> Value:
        record = tape.values[index]
        activation = index in acted_on and shared.get(index) is None
        twin = tape.equal.get(index)
        return Value(
            index=index,
            name=record.name,
            shape=record.ref.geometry[0],
            encoded_shape=encode_view(tape, index).geometry[0],
            dtype=str(record.ref.dtype).removeprefix("torch."),
            nbytes=record.nbytes,
            producer=record.producer,
            saved=index in set(tape.saved_values()),
            activation=activation,
            shared=shared.get(index),
            recomputable=index in tape.recomputable,
            role=role_of(tape, index),
            codecs=with_outliers(prices.codecs[index], tape, index, self.config, outliers[index]) if activation else (),
            equal_to=twin,
        )

    def add_forwards(self, forwards: list[tuple[ForwardEvent, ...]]) -> list[KindProfile]:
        """Give each kind its measured forward."""
        self._kinds = [_with_forward(kind, forward) for kind, forward in zip(self._kinds, forwards, strict=True)]
        return self._kinds

    def follow_full_recomputation(self, installation: Installation, watched: Mapping[int, str]) -> list[WatchSlots]:
        """Put every block under full recomputation, but for the watched one of each kind; returns the watchers."""
        watchers = []
        for block in self.blocks:
            function, kind = installation.functions[block.name], self._kinds[block.kind]
            if watched[block.kind] == block.name:
                function.strategy = WatchSlots(block.name, kind)
                watchers.append(function.strategy)
            else:
                tapes = {block.key: block.tape}
                function.strategy = FollowPlan(block.name, _recompute_plan(kind), self.library, tapes)
            block.arguments = {}
        return watchers

    def shared_in_replay(self, watched: Mapping[int, str]) -> frozenset[int]:
        """Shared inputs that blocks under full recomputation hold for replay."""
        kinds = {block.kind for block in self.blocks if watched[block.kind] != block.name}
        return frozenset().union(*(_recompute_outcome(self._kinds[kind]).shared for kind in kinds))


def recompute_stored_bytes(kind: KindProfile) -> int:
    """Bytes that a block of `kind` stores when all that can be is recomputed."""
    return _recompute_outcome(kind).stored_bytes


def _recompute_outcome(kind: KindProfile) -> BlockOutcome:
    return run_block(kind, _recompute_plan(kind))


def _recompute_plan(kind: KindProfile) -> Plan:
    choices = tuple((v.index, RECOMPUTE if v.recomputable else RETAIN) for v in kind.activations)
    return Plan(kind=kind.digest, choices=choices)


def _operator(tape: Tape, index: int, ms: float) -> Operator:
    operator = tape.operators[index]
    return Operator(
        index=index,
        name=operator.name,
        module=operator.module,
        inputs=tuple(value for value in operator.inputs() if not tape.is_module_state(value)),
        outputs=tuple(operator.made()),
        ms=ms,
        replayable=not tape.recomputable.isdisjoint(operator.made()),
    )


def _with_forward(kind: KindProfile, forward: tuple[ForwardEvent, ...]) -> KindProfile:
    """`kind` with its measured forward; casts of parameters that forward did not let go of are cached."""
    dead = {event.value for event in forward if event.death}
    values = tuple(replace(v, cached=v.role == "parameter" and v.index not in dead) for v in kind.values)
    return replace(kind, values=values, forward=forward)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _refuse_backward(_: Any) -> torch.Tensor:
    raise AssertionError("the recording forward has no backward")
