"""Recording of a model's blocks in a forward that trains: operators, times, codecs, and shared tensors."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.call_names import split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import unpack_order
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.price.block_memory import BlockMemory, RepeatedCall, measure_block
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.codec_selection import is_parameter_cast
from adacc_hf.price.measurement import Measurement, Prices
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.preserved_values import preserved_block
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors, TensorNote, storage_key_of
from adacc_hf.price.tile_memory import TileMemory, measure_tile, tiled_inputs
from adacc_hf.run.call import Recording
from adacc_hf.tape.execution_plan import unfit_values
from adacc_hf.tape.guards import KnownShapes
from adacc_hf.tape.inputs import argument_tensors
from adacc_hf.tape.operator_effects import HIDDEN
from adacc_hf.tape.recorder import Recorder
from adacc_hf.tape.replay import view
from adacc_hf.tape.replay_check import is_reproducible, obtainable_values
from adacc_hf.tape.tape import Source, Tape
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.tape.tiled_rows import in_tiles
from adacc_hf.torch_glue.block_state import BlockState, changes_in_place
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.private import storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import storage_of


class ModelRecorder:
    """Recorder of one forward of a model: all blocks' operators, the tensors that blocks share, and times and codecs.

    Each recorded call follows a plan that recomputes all it can. `tilings` maps block calls to their tiles. The memory
    of a block is measured on its traced graph, or, in tiles and on fake tensors, on the block's own code, which runs
    once more for each kind of block. If `repeats_blocks`, forward is always measured on the block's own code, which
    keeps some tensors longer than the graph. The recorder does not refer to the model, to avoid a reference cycle.
    """

    def __init__(
        self,
        config: AdaccConfig,
        measurement: Measurement,
        tape_cache: TapeCache,
        tilings: Mapping[str, Tiling],
        device: torch.device,
        repeats_blocks: bool,
    ) -> None:
        self.tape_cache = tape_cache
        self._device = device
        self._repeats_blocks = repeats_blocks
        self._tilings = tilings
        self.blocks: list[RecordedBlock] = []
        self._untrusted: set[type[nn.Module]] = set()
        """Classes of blocks whose operators cannot be replayed. Their later calls run under torch's checkpoint."""
        self.leftovers: Counter[str] = Counter()
        """Bytes that measurements of each call left in autocast's cache until the forward's end: casts of copies."""
        self._config = config
        self._measurement = measurement
        self._tile_memory: dict[str, dict[str, TileMemory]] = {}
        """`RecordedBlock.tile_memory` by the digest of the block's tape."""
        self._prices: dict[str, Prices] = {}
        self._memory: dict[tuple[str, bool], BlockMemory] = {}
        """Memory by (digest of the call's tape, True if the parameters have gradients when the backward begins)."""
        self.leaves_gradients = False
        self._outside_storages: dict[int, StorageWeakRef] = {}
        """Storages of tensors that autograd saves outside the blocks, by address, which a weak reference keeps from
        being reused. A strong one would keep logits live throughout the profile."""
        self._previous_results: list[TensorNote] = []
        """Tensors that the previous recorded block call returned."""
        self._shared_tensors = SharedTensors([], set(), set(), set())

    def end_forward(self, state_keys: set[int], batch_keys: set[int]) -> None:
        """Record which saved tensors are alive, while the loss keeps the graph alive. `state_keys` and `batch_keys` are
        the storages of the model's state and of the batch."""
        self._previous_results = []
        for block in self.blocks:
            block.note_liveness()
        if any(block.externally_held for block in self.blocks):
            gc.collect()  # free the values that only reference cycles hold
            for block in self.blocks:
                block.note_liveness()
        self._shared_tensors = SharedTensors(self.blocks, self._outside_storages.keys(), state_keys, batch_keys)

    def recording(self) -> ModelRecording:
        """Return the recording of the forward, and free the tensors of the forward."""
        return ModelRecording(self.blocks, self._shared_tensors, self._prices, self._memory, self._config)

    @property
    def has_run(self) -> bool:
        """True if autograd has saved a tensor."""
        return bool(self.blocks or self._outside_storages)

    def record_call(
        self, name: str, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run and record one call of a block, and return its result. Measure times and codecs if no earlier call ran
        the same operators."""
        known_shapes = KnownShapes(self.tape_cache.untraceable)
        tiling = self._tilings.get(name)
        # Take the key before the call, as in training: a block may append its auxiliary loss to a list argument.
        key = known_shapes.key(block, fn, args, kwargs, tiling)
        called = in_tiles(block, tiling, fn)
        arguments = {Source("argument", path): tensor for path, tensor in argument_tensors(args, kwargs)}
        recording = Recording(name, block, args, kwargs, self._measurement.rng_use, keeps_results=tiling is not None)
        state = BlockState(block, (args, kwargs)) if self._repeats_blocks else None
        is_checkpointed = (key is None or type(block) in self._untrusted) and not changes_in_place(block)
        started = self._measurement.seconds_at(self._device)
        result = recording.run_checkpointed(called) if is_checkpointed else recording.run(called)
        run_ms = 1e3 * (self._measurement.seconds_at(self._device) - started)
        may_repeat = state is not None and state.find_changes() is None
        if key is None and known_shapes.paths.leave_out(recording.recorder.function_results):
            key = known_shapes.key(block, fn, args, kwargs, tiling)
        for tensor in arguments.values():
            if tensor.is_leaf and tensor.requires_grad:  # `enable_input_require_grads` makes some, and autograd holds
                self.note_outside_storage(tensor)
        tensors = [*arguments.values(), *block.parameters()]
        states = self._measurement.random_states({tensor.device for tensor in tensors})
        recorder = recording.recorder
        tape = self.tape_cache.verified_tape(recorder)
        if key is None and tape.untrusted is None:
            tape.untrusted = f"Dynamo, which reads the code of blocks, stops: {known_shapes.paths.untraced}"
        if key is not None:
            known_shapes.paths.compare_graph(tape, fn, args)
        outliers, errors = dict[int, int](), GradientErrors()
        if self._tilings:  # times and codecs are those of the kinds without tiles
            self._prices[tape.digest] = Prices([0.0] * len(tape.operators), [0] * len(tape.operators))
        else:
            outliers = self._measurement.outliers(tape, recorder.bases, self._config)
            if tape.digest not in self._prices:
                self._prices[tape.digest] = self._price(tape, recorder, outliers, run_ms)
            errors = self._measurement.gradient_errors(tape, recorder.bases, self._prices[tape.digest], self._config)
        if tiling is not None and tape.digest not in self._tile_memory:
            self._tile_memory[tape.digest] = self._measure_tiles(tape, recorder, tiling, called)
        if key is not None:
            self.tape_cache.remember(tape, key, name)
        num_results = _num_results(result, arguments.values())
        input_values = [value.index for value in tape.values if tape.is_block_input(value.index)]
        outputs = {} if tape.untrusted else _saved_outputs(recorder, tape, result)
        casts = {} if tape.untrusted else _saved_casts(recorder, tape)
        previous_keys = {note.key for note in self._previous_results}
        notes = {value: TensorNote.of(recorder.bases[value]) for value in input_values}
        internal_storages = _internal_storages(recorder, tape, outputs.keys() | casts.keys())
        slot_refs = recording.references()
        changes_state = changes_in_place(block)
        is_checkpointed &= not changes_state and (not tape.verified or is_reproducible(tape))
        kept_values = frozenset[int]()
        if is_checkpointed:
            recording.discard()
        else:
            kept_values = self._hand_over(recording, tape)
        if tape.untrusted is not None:
            self._untrusted.add(type(block))
        overwritten = [value.index for value in tape.values if value.source is not None and value.overwritten]
        written = recorder.unseen_writes | {storage_key_of(recorder.bases[value]) for value in overwritten}
        recording.close()
        del recorder, tensors
        if tape.untrusted is None:
            has_graph = known_shapes.paths.has_graph_of(tape) or not may_repeat
            traced = known_shapes.paths.graph_of(fn, args) if tiling is None and has_graph else None
            own = RepeatedCall.of_block(block, fn, args, tiling, num_results, written)
            graph = own if traced is None else RepeatedCall.of_graph(*traced, num_results, written)
            call = own if may_repeat else graph
            with preserved_block(block, (args, kwargs)) if call is own else nullcontext():
                self._measure_memory(name, call, graph, tape, slot_refs)
            recording.reschedule()
        # Under torch's checkpoint, a traced block's graph runs again, and keeps the arguments that it reads.
        keys = {note.key for note in notes.values()}
        repeats_code = tape.untrusted is not None or is_sharded(block) or not known_shapes.paths.has_graph()
        held_arguments = {source: t for source, t in arguments.items() if repeats_code or storage_key_of(t) in keys}
        self.blocks.append(
            RecordedBlock(
                name=name,
                tape=tape,
                input_tensors=notes,
                argument_tensors=_one_per_storage(held_arguments),
                outputs=outputs,
                casts=casts,
                internal_storages=internal_storages,
                tile_memory=self._tile_memory.get(tape.digest, {}),
                slot_refs=slot_refs,
                kept_values=kept_values,
                is_checkpointed=is_checkpointed,
                changes_state=changes_state,
                outliers=outliers,
                errors=errors,
                uses_previous_result=not previous_keys.isdisjoint(map(storage_key_of, arguments.values())),
            )
        )
        self._previous_results = [TensorNote.of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        # Measuring drew random numbers too. The rest of the forward must draw the same numbers as later passes.
        states.restore()
        return result

    def _hand_over(self, recording: Recording, tape: Tape) -> frozenset[int]:
        """Hand the saved tensors of a recorded call over to a plan that recomputes all it can. Return the values that
        the call keeps."""
        all_saved = frozenset(tape.saved_values())
        if tape.untrusted is not None:
            return all_saved
        saved = [value for value in tape.saved_values() if tape.values[value].source is None]
        recomputable = obtainable_values(tape, tape.recomputable, all_saved)
        inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
        choices = dict.fromkeys(inputs, RETAIN)
        choices |= {value: RECOMPUTE if value in recomputable else RETAIN for value in saved}
        choices |= dict.fromkeys(unfit_values(choices, tape), RETAIN)
        plan = self.tape_cache.execution_plan(tape, choices, frozenset())
        if not plan.is_plain:
            recording.hand_over(plan, {}, {})
        return frozenset(plan.roots) | {value for value in saved if choices[value] is RETAIN}

    def _price(self, tape: Tape, recorder: Recorder, outliers: dict[int, int], run_ms: float) -> Prices:
        """Measure the times and codec costs of a recorded call, which took `run_ms`."""
        if not tape.values:  # the block returns its arguments unchanged
            return Prices([], [])
        if tape.untrusted in HIDDEN and not tape.has_collectives:
            return Prices([run_ms], [0])
        return self._measurement.price(tape, recorder.bases, self._config, outliers)

    def _measure_memory(
        self, name: str, call: RepeatedCall, graph: RepeatedCall, tape: Tape, slot_refs: list[Any]
    ) -> None:
        """Measure the memory of a block's `call`, and of the backward of its `graph`, unless a call with the same tape
        was measured. The backward of a block's earlier call will find gradients."""
        is_later = split_call(name)[1] > 1
        dead_slots = frozenset(slot for slot, reference in enumerate(slot_refs) if reference() is None)
        device = tape.values[0].device if tape.values else self._device
        for has_gradients in {self.leaves_gradients, self.leaves_gradients or is_later}:
            if (tape.digest, has_gradients) in self._memory:
                continue
            memory = BlockMemory()
            with self._measurement.meter(device) as meter:
                if tape.values:
                    memory = measure_block(call, graph, tape, dead_slots, self._measurement, has_gradients)
                meter.mark(("end",))
            if torch.is_autocast_enabled(device.type):
                self.leftovers[name] += meter.points[-1].live_bytes
            self.tape_cache.learn_order(tape, unpack_order(memory.backward))
            self._memory[tape.digest, has_gradients] = memory

    def _measure_tiles(
        self, tape: Tape, recorder: Recorder, tiling: Tiling, run_again: Callable[..., Any]
    ) -> dict[str, TileMemory]:
        """Measure the memory of one tile of each module that ran in tiles, by the module's path."""
        memory: dict[str, TileMemory] = {}
        for path, rows in tiled_inputs(tape, tiling).items():
            tensor = view(recorder.bases[rows.value], rows)
            with preserved_block(recorder.block, ()):
                tile = measure_tile(recorder.block.get_submodule(path), tensor, self._measurement)
            if tile is not None:
                memory[path] = tile
        return memory

    def note_outside_storage(self, tensor: torch.Tensor) -> None:
        """Record the storage of a tensor that autograd saves outside the blocks."""
        storage = storage_of(tensor)
        if storage_key(storage) not in self._outside_storages:
            self._outside_storages[storage_key(storage)] = StorageWeakRef(storage)


def state_storages(model: nn.Module) -> set[int]:
    """Return the keys of the storages of the model's parameters and buffers, except for empty ones: ZeRO 3 frees a
    gathered parameter's empty storage, and another tensor may get its address."""
    return {storage_key_of(tensor) for tensor in [*model.parameters(), *model.buffers()] if tensor.numel()}


def _num_results(result: Any, arguments: Iterable[torch.Tensor]) -> int:
    """Return the number of tensors in a call's result that require gradients and are not among the arguments."""
    tensors = {id(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return len(tensors - {id(tensor) for tensor in arguments})


def _one_per_storage(arguments: Mapping[Source, torch.Tensor]) -> dict[Source, TensorNote]:
    """Return notes on the first tensor of each storage in `arguments`."""
    first_sources: dict[int, Source] = {}
    for source, tensor in arguments.items():
        first_sources.setdefault(storage_key_of(tensor), source)
    return {source: TensorNote.of(arguments[source]) for source in first_sources.values()}


def _saved_outputs(recorder: Recorder, tape: Tape, result: Any) -> dict[int, TensorNote]:
    """Return notes on the saved values that the block computed and returned."""
    saved = set(tape.saved_values())
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {value: TensorNote.of(tensor) for tensor in tensors if (value := recorder.made_value(tensor)) in saved}


def _saved_casts(recorder: Recorder, tape: Tape) -> dict[int, TensorNote]:
    """Return notes on the saved values computed from parameters alone, such as autocast's casts."""
    computed_values = [value for value in tape.saved_values() if tape.values[value].producer is not None]
    return {v: TensorNote.of(recorder.bases[v]) for v in computed_values if is_parameter_cast(tape, v)}


def _internal_storages(recorder: Recorder, tape: Tape, excluded: Set[int]) -> dict[int, StorageWeakRef]:
    """Return the storages of the saved values that the block computed, without `excluded`. Results of code whose
    operators cannot be recorded have an unknown source on the tape, and are included."""
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
