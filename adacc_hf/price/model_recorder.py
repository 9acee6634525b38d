"""Recording of a model's blocks in one forward: their tapes, their kinds, and the tensors that they share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.block_walk import BlockOutcome
from adacc_hf.artifacts.call_names import call_name, calls_per_block, split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.profile import BackwardEvent, ForwardEvent, KindProfile, unpack_order
from adacc_hf.price.codec_selection import is_parameter_cast
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.kind_profile_builder import KindProfileBuilder
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_probes import SlotProbe, refuse_backward
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors, storage_key_of
from adacc_hf.price.unreplayable_kinds import saved_bytes, untrusted_kind, with_untrusted_forward
from adacc_hf.run.block_executor import BlockExecutor
from adacc_hf.run.blocks import Installation
from adacc_hf.run.call import Recording
from adacc_hf.tape.call_key import CallKey, KnownShape, KnownShapes
from adacc_hf.tape.inputs import argument_tensors
from adacc_hf.tape.recorder import HIDDEN, Recorder
from adacc_hf.tape.tape import Source, Tape
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.distributed import fail_together, is_sharded
from adacc_hf.torch_glue.memory import forward_loss
from adacc_hf.torch_glue.model_state import SMALL_COPY
from adacc_hf.torch_glue.no_trace import NoTrace
from adacc_hf.torch_glue.private import storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import storage_of


class RecordingStrategy:
    """The strategy that records every call of a block. Saved tensors are freed at once, because no backward follows."""

    expects_outer_hooks = True

    def __init__(self, name: str, model_recorder: ModelRecorder) -> None:
        self.name = name
        self.model_recorder = model_recorder
        self.num_calls = 0

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Recording and pricing take more memory than training does, and the next block's parameters need all ranks.
        with fail_together() if self.model_recorder.is_sharded else nullcontext():
            return self._record_call(block, fn, args, kwargs)

    def _record_call(self, block: nn.Module, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        name = call_name(self.name, self.num_calls)
        known_shapes = KnownShapes(self.model_recorder.tape_cache.untraceable)
        # Take the key before the call, as in training: a block may append its auxiliary loss to a list argument.
        key = known_shapes.key(block, fn, args, kwargs)
        arguments = {Source("argument", path): tensor for path, tensor in argument_tensors(args, kwargs)}
        recording = Recording(name, block, args, kwargs, self.model_recorder.measurement.rng_use)
        result = recording.run(fn)
        self.model_recorder.note_gradient_leaves(arguments.values())
        tensors = [*arguments.values(), *block.parameters()]
        states = self.model_recorder.measurement.random_states({tensor.device for tensor in tensors})
        self.model_recorder.add(name, known_shapes, key, recording, arguments, result, partial(fn, *args))
        # Measuring drew random numbers too. The rest of the forward must draw the same numbers as later passes.
        states.restore()
        return result


class ModelRecorder:
    """All blocks' tapes, the tensors they share with each other and with the rest of the model, and the measured
    prices."""

    def __init__(self, config: AdaccConfig, measurement: Measurement, tape_cache: TapeCache | None = None) -> None:
        """Start an empty recording. `tape_cache` is the cache of another recorder of the same model, if there is
        one."""
        self.config = config
        self.measurement = measurement
        self.tape_cache = tape_cache or TapeCache(measurement.verify)
        self.blocks: list[RecordedBlock] = []
        self._prices: dict[str, Prices] = {}
        self._outside_storages: dict[int, StorageWeakRef] = {}
        """Storages saved by the rest of the model. A weak reference keeps the address from being reused without keeping
        the memory alive: logits would otherwise be live throughout the profile."""
        self._previous_results: list[torch.Tensor] = []
        """Tensors that the block recorded last has returned."""
        self._kinds: list[KindProfile] = []
        self._saved_bytes: dict[str, int] = {}
        """Bytes that autograd saved in each call whose operators cannot be replayed."""
        self.shared_tensors = SharedTensors([], set(), set(), set())
        self.calls_before_rest: set[str] = set()
        """Calls after which the rest of the model runs before the next call of a block."""
        self.is_sharded = False
        """True if the model's forward needs all ranks."""

    def record(self, model: nn.Module, batch: Mapping[str, Any], installation: Installation) -> None:
        """Run one forward, and record every block and the tensors that the rest of the model saves."""
        self.is_sharded = is_sharded(model)
        installation.begin_step()
        for name, function in installation.blocks.items():
            function.strategy = RecordingStrategy(name, self)
        state_keys = {storage_key_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        batch_keys = {storage_key_of(tensor) for _, tensor in argument_tensors((), dict(batch))}
        torch.clear_autocast_cache()
        with torch.autograd.graph.saved_tensors_hooks(self._save_outside, refuse_backward):
            loss = forward_loss(model, batch)
        self._previous_results = []
        for block in self.blocks:
            block.note_liveness()  # while the loss keeps the graph that backward will walk alive
        if any(block.externally_held for block in self.blocks):
            gc.collect()  # free the values that only reference cycles hold
            for block in self.blocks:
                block.note_liveness()
        del loss
        self.shared_tensors = SharedTensors(self.blocks, self._outside_storages.keys(), state_keys, batch_keys)

    def add(
        self,
        name: str,
        known_shapes: KnownShapes,
        key: CallKey,
        recording: Recording,
        arguments: Mapping[Source, torch.Tensor],
        result: Any,
        run_again: Callable[[], Any],
    ) -> None:
        """Add one block's call, free its recording, and measure prices if no earlier call has an equal tape."""
        recorder = recording.recorder
        tape = self.tape_cache.verified_tape(recorder)
        outliers = self.measurement.outliers(tape, recorder.bases, self.config)
        if tape.digest not in self._prices:
            self._prices[tape.digest] = self._price(tape, recorder, outliers, run_again)
        errors = self.measurement.gradient_errors(tape, recorder.bases, self._prices[tape.digest], self.config)
        self.tape_cache.remember(tape, key, recording.name)
        known_shapes.add(key, KnownShape(tape, num_calls=2))
        input_values = [value.index for value in tape.values if tape.is_block_input(value.index)]
        outputs = {} if tape.untrusted else _saved_outputs(recorder, tape, result)
        casts = {} if tape.untrusted else _saved_casts(recorder, tape)
        previous_keys = {*map(storage_key_of, self._previous_results)}
        self.blocks.append(
            RecordedBlock(
                name=name,
                known_shapes=known_shapes,
                tape=tape,
                input_tensors={value: recorder.bases[value] for value in input_values},
                argument_tensors=_one_per_storage(arguments),
                outputs=outputs,
                casts=casts,
                internal_storages=_internal_storages(recorder, tape, outputs.keys() | casts.keys()),
                slot_refs=recording.discard(),
                outliers=outliers,
                errors=errors,
                uses_previous_result=not previous_keys.isdisjoint(map(storage_key_of, arguments.values())),
            )
        )
        self._previous_results = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def _price(self, tape: Tape, recorder: Recorder, outliers: dict[int, int], run_again: Callable[[], Any]) -> Prices:
        bases = recorder.bases
        if not tape.values:  # the block returns its arguments unchanged
            return Prices([], [])
        device = bases[0].device
        with NoTrace((recorder.block, run_again), lambda: self.measurement.random_states([device]), SMALL_COPY):
            if tape.untrusted in HIDDEN and not tape.has_collectives:
                return self.measurement.price_call(run_again, device)
            is_alone = tape.untrusted is None and not tape.has_collectives
            return self.measurement.price(tape, bases, self.config, outliers, run_again if is_alone else None)

    def note_gradient_leaves(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register input leaves that require a gradient, which autograd holds. `enable_input_require_grads` makes
        some."""
        for tensor in tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self._note_outside_storage(tensor)

    def _save_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note_outside_storage(tensor)
        return tensor.detach()

    def _note_outside_storage(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage_key(storage) not in self._outside_storages:
            self._outside_storages[storage_key(storage)] = StorageWeakRef(storage)

    def kinds(self) -> list[KindProfile]:
        """Group the blocks by kind, set each block's `kind`, and return one profile per kind. Their memory is not
        measured yet."""
        groups: dict[Any, list[RecordedBlock]] = {}
        positions = self._call_positions()
        for block in self.blocks:
            groups.setdefault((self._kind_key(block), positions[block.name]), []).append(block)
        for index, group in enumerate(groups.values()):
            for block in group:
                block.kind = index
            self._kinds.append(self._build_kind(group))
        return self._kinds

    def _call_positions(self) -> dict[str, tuple[bool, ...]]:
        """Return a dict from each call to the properties of its position in the step that affect its memory.

        A position is three truth values: the gradients of the call's parameters exist before its backward, and the rest
        of the model runs before the call, and after it. The last two occur if the loss calls the whole model several
        times.
        """
        names = [block.name for block in self.blocks]
        last = calls_per_block(names)
        numbers = [split_call(name) for name in names]
        # True where the rest of the model runs before the call: the loss calls the model again, with other inputs.
        begins = [
            number > previous_number and not block.uses_previous_result
            for block, (_, number), (_, previous_number) in zip(self.blocks, numbers, [("", 1), *numbers], strict=False)
        ]
        ends = [*begins[1:], False]
        self.calls_before_rest = {name for name, is_end in zip(names, ends, strict=True) if is_end}
        return {
            name: (number < last[block], begin, end)
            for name, (block, number), begin, end in zip(names, numbers, begins, ends, strict=True)
        }

    def _kind_key(self, block: RecordedBlock) -> tuple[Any, ...]:
        """Return the key that blocks of one kind share: everything in the tape, or only the class and the arguments if
        the block's operators may depend on data."""
        if block.tape.untrusted is None:
            return block.tape.digest, block.dead_slots, block.externally_held, *self._sharing_key(block)
        inputs, _, _ = self._sharing_key(block)
        signatures = [(source, tensor.shape, tensor.dtype) for source, tensor in block.argument_tensors.items()]
        return block.tape.identity, bool(block.tape.slots), block.tape.has_collectives, tuple(signatures), inputs

    def saved_bytes(self, name: str) -> int:
        """Return the bytes that autograd saved in the call `name`, whose operators cannot be replayed."""
        return self._saved_bytes[name]

    def _sharing_key(self, block: RecordedBlock) -> tuple[Any, ...]:
        """Return the records of a block's shared inputs, the outputs that others hold, and the casts that others
        hold."""
        inputs = tuple(self.shared_tensors.record_index(tensor) for tensor in block.holdable_inputs())
        outputs = tuple(
            value for value, tensor in block.outputs.items() if self.shared_tensors.is_shared_output(tensor)
        )
        casts = {value: tensor for value, tensor in block.casts.items() if self.shared_tensors.is_shared_cast(tensor)}
        return (
            inputs,
            outputs,
            tuple((value, self.shared_tensors.owns_cast(block, cast)) for value, cast in casts.items()),
        )

    def _build_kind(self, group: list[RecordedBlock]) -> KindProfile:
        tape = group[0].tape
        prices = self._prices[tape.digest]
        if tape.untrusted is not None:
            self._saved_bytes |= {block.name: saved_bytes(block, self.shared_tensors) for block in group}
            times = [sum(self._prices[block.tape.digest].operator_ms) for block in group]
            kind = untrusted_kind(group, self.shared_tensors, sum(times) / len(times))
        else:
            kind = KindProfileBuilder(group, self.shared_tensors, prices, self.config).build()
        replay_records = recompute_outcome(kind).shared
        unsaved = tuple(sorted(i for i in replay_records if not self.shared_tensors.records[i].saved))
        return replace(kind, held=unsaved, untraced=group[0].known_shapes.untraced)

    def set_forwards(self, forwards: list[tuple[ForwardEvent, ...]]) -> list[KindProfile]:
        """Add the measured forward of each kind to its profile, and return the profiles."""
        self._kinds = [_with_forward(kind, forward) for kind, forward in zip(self._kinds, forwards, strict=True)]
        return self._kinds

    def set_full_recompute_strategies(
        self, installation: Installation, watched_names: Collection[str], sources: Mapping[str, Sequence[Source]]
    ) -> list[SlotProbe]:
        """Run every block under full recomputation, and each watched one under a probe. Return the probes.

        A watched block whose operators cannot be replayed has no probe, and recomputes too. `sources` comes from
        `replay_sources()`.
        """
        probes = []
        for block in self.blocks:
            function, kind = installation.functions[block.name], self._kinds[block.kind]
            if block.name in watched_names and kind.untrusted is None:
                function.strategy = SlotProbe(block.name, kind, sources[block.name])
                probes.append(function.strategy)
            else:
                function.strategy = BlockExecutor(block.name, recompute_plan(kind), self.tape_cache, block.known_shapes)
        return probes

    def release_tensors(self) -> None:
        """Free the tensors of the recorded forward."""
        for block in self.blocks:
            block.input_tensors, block.argument_tensors, block.outputs, block.casts = {}, {}, {}, {}

    def learn_orders(self, events: Mapping[str, Sequence[BackwardEvent]]) -> None:
        """Learn the order in which backward unpacks saved tensors from the measured `events` of the watched blocks."""
        for block in self.blocks:
            self.tape_cache.learn_order(block.tape, unpack_order(events.get(block.name, ())))

    def replay_sources(self) -> dict[str, list[Source]]:
        """Return the sources of the shared inputs that each block holds for replay under full recomputation."""
        replay_records = [recompute_outcome(kind).shared for kind in self._kinds]
        return {block.name: self.shared_tensors.sources(block, replay_records[block.kind]) for block in self.blocks}


def _one_per_storage(arguments: Mapping[Source, torch.Tensor]) -> dict[Source, torch.Tensor]:
    """Return the first tensor of each storage among the `arguments`, detached."""
    first_sources: dict[int, Source] = {}
    for source, tensor in arguments.items():
        first_sources.setdefault(storage_key_of(tensor), source)
    return {source: arguments[source].detach() for source in first_sources.values()}


def _saved_outputs(recorder: Recorder, tape: Tape, result: Any) -> dict[int, torch.Tensor]:
    """Return the saved values that the block computed and returned."""
    saved = set(tape.saved_values())
    tensors = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {value: tensor for tensor in tensors if (value := recorder.made_value(tensor)) in saved}


def _saved_casts(recorder: Recorder, tape: Tape) -> dict[int, torch.Tensor]:
    """Return the saved values that the block computed from its parameters alone."""
    computed_values = [value for value in tape.saved_values() if tape.values[value].producer is not None]
    return {value: recorder.bases[value] for value in computed_values if is_parameter_cast(tape, value)}


def _internal_storages(recorder: Recorder, tape: Tape, excluded: Set[int]) -> dict[int, StorageWeakRef]:
    """Return the storages of the saved values that the block computed, without the values of `excluded`.

    If the block runs code that records no operators, that code's results have an unknown source on the tape and are
    included too.
    """
    hidden = tape.untrusted in HIDDEN
    computed_values = [
        value
        for value in tape.saved_values()
        if tape.values[value].producer is not None or (hidden and tape.values[value].source == Source("unknown", ()))
    ]
    return {
        value: StorageWeakRef(recorder.bases[value].untyped_storage())
        for value in computed_values
        if value not in excluded
    }


def recompute_outcome(kind: KindProfile) -> BlockOutcome:
    """Return the tensors and bytes that a block of `kind` stores and needs under full recomputation."""
    return run_block(kind, recompute_plan(kind))


def _with_forward(kind: KindProfile, forward: tuple[ForwardEvent, ...]) -> KindProfile:
    """Return `kind` with its measured forward. Parameter casts that the forward did not free count as cached."""
    if kind.untrusted is not None:
        return with_untrusted_forward(kind, forward)
    dead = {event.value for event in forward if event.death}
    values = tuple(replace(v, cached=v.cached or (v.role == "parameter" and v.index not in dead)) for v in kind.values)
    return replace(kind, values=values, forward=forward)
