"""Recording of a model's blocks in one forward: operators, measured times and codecs, and tensors shared between
blocks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from adacc_hf.artifacts.call_names import call_name, split_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.artifacts.kind_profile import unpack_order
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.price.batch import Batch
from adacc_hf.price.block_memory import BlockMemory, RepeatedCall, measure_block, refuse_backward
from adacc_hf.price.codec_selection import is_parameter_cast
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.idle_blocks import ExecutedBlocks, describe_uncalled
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.profiled_model import ProfiledModel
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors, TensorNote, storage_key_of
from adacc_hf.price.tile_memory import TileMemory, measure_tile, tiled_inputs
from adacc_hf.run.call import Recording
from adacc_hf.tape.call_key import KnownShape, KnownShapes
from adacc_hf.tape.inputs import argument_tensors
from adacc_hf.tape.recorder import HIDDEN, Recorder
from adacc_hf.tape.replay import view
from adacc_hf.tape.tape import Source, Tape
from adacc_hf.tape.tape_cache import TapeCache, profiled_tapes
from adacc_hf.tape.tiled_rows import in_tiles
from adacc_hf.torch_glue.distributed import fail_together, is_sharded
from adacc_hf.torch_glue.model_state import SMALL_COPY
from adacc_hf.torch_glue.no_trace import NoTrace
from adacc_hf.torch_glue.private import storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import storage_of

log = logging.getLogger(__name__)

MAX_DRAWS = 8
"""Maximum number of random states that are tried to find one with which all blocks run. The search is needed if the
model skips blocks at random. Each try is a forward without gradients."""


def record_model(
    profiled: ProfiledModel,
    batch: Batch,
    tape_cache: TapeCache | None = None,
    tilings: Mapping[str, Tiling] | None = None,
) -> ModelRecording:
    """Record every block in one forward, and measure the times of the blocks' operators and codecs.

    If the model skips blocks at random, random states are tried until all blocks run. All later passes of the profile
    repeat the recorded forward. `tape_cache` is the cache of an earlier recording of the model, or None. `tilings` maps
    each block call to the tiles (groups of rows) in which modules of the block run. Raises UncalledBlocksError if no
    forward runs all blocks.
    """
    installation = profiled.installation
    tables: frozenset[Any] = frozenset()
    earlier_structures: set[str] = set()
    calls_again = False
    while True:
        used_cache = tape_cache or _new_tape_cache(profiled)
        recorder = ModelRecorder(profiled.config, profiled.measurement, used_cache, tilings or {}, calls_again)
        recorder.record(profiled, batch)
        called = {block.name for block in recorder.blocks}
        if not called:
            with ExecutedBlocks(installation.modules) as executed:
                profiled.model(**batch.tensors)
            uncalled = list(installation.modules)
            raise UncalledBlocksError(describe_uncalled(installation, uncalled, "with this batch", executed))
        # The first forward may build tables that every later forward reuses. Training runs like the later ones.
        tables, tables_before = profiled.no_trace.start_over(), tables
        has_uncalled = bool(installation.modules.keys() - called)
        has_new_draws = has_uncalled and _find_draws_of_all_blocks(profiled, batch)
        structures = {block.tape.structure for block in recorder.blocks}
        called_again, calls_again = calls_again, any(split_call(name)[1] > 1 for name in called)
        if tables == tables_before and not has_new_draws and called_again == calls_again:
            recorder.tape_cache.preliminary |= earlier_structures - structures
            return recorder.recording()
        earlier_structures |= structures


def _new_tape_cache(profiled: ProfiledModel) -> TapeCache:
    tape_cache = TapeCache(profiled.measurement.verify)
    tape_cache.expect_same_orders(profiled_tapes(profiled.installation.model))
    return tape_cache


def _find_draws_of_all_blocks(profiled: ProfiledModel, batch: Batch) -> bool:
    """Check that a forward without gradients runs all blocks, including blocks that the batch does not train, such as a
    teacher's blocks. If the forward draws random numbers and skips blocks, try other random states. Return True if
    later passes will start from a different random state than before. Raises UncalledBlocksError if some block never
    runs."""
    modules, no_trace = profiled.installation.modules, profiled.no_trace
    for num_draws in range(1 + MAX_DRAWS):
        with ExecutedBlocks(modules) as executed, torch.no_grad():
            profiled.model(**batch.tensors)
        uncalled = [name for name in modules if name not in executed.names]
        if not uncalled:
            return num_draws > 0
        if not no_trace.has_drawn():
            break
        no_trace.continue_random_states()
    raise UncalledBlocksError(describe_uncalled(profiled.installation, uncalled, "with this batch"))


class RecordingStrategy:
    """Strategy that records every call of a block while the model is profiled, with times and codecs.

    Saved tensors are freed immediately, because no backward follows.
    """

    expects_outer_hooks = True

    def __init__(self, name: str, model_recorder: ModelRecorder) -> None:
        self.name = name
        self.model_recorder = model_recorder
        self.num_calls = 0

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += 1
        # Recording and pricing take more memory than training does, and the next block's parameters need all ranks.
        with fail_together() if self.model_recorder.is_sharded else nullcontext():
            return self.model_recorder.record_call(call_name(self.name, self.num_calls), block, fn, args, kwargs)


class ModelRecorder:
    """Recorder of one forward of a model: all blocks' operators, the tensors that blocks share, and times and codecs.

    The strategies that run the model's blocks refer to the recorder. The recorder does not refer to the model, to avoid
    a reference cycle.
    """

    def __init__(
        self,
        config: AdaccConfig,
        measurement: Measurement,
        tape_cache: TapeCache,
        tilings: Mapping[str, Tiling],
        calls_again: bool,
    ) -> None:
        self.tape_cache = tape_cache
        self._tilings = tilings
        self.blocks: list[RecordedBlock] = []
        self.trains = False
        """True if the recorded calls are those of a training step, so that no call of the user's code runs again."""
        self.is_sharded = False
        """True if the model's parameters are sharded among ranks, so that its forward needs all ranks."""
        self._config = config
        self._measurement = measurement
        self.tile_memory: dict[str, dict[str, TileMemory]] = {}
        """Memory of one tile (group of rows) of each row-wise module of a block. The outer key is the digest of the
        block's tape with the modules in tiles, the inner key the module's path. A row-wise module computes each row
        from that row alone."""
        self._prices: dict[str, Prices] = {}
        self._memory: dict[tuple[str, bool], BlockMemory] = {}
        """Memory by (digest of the call's tape, True if the parameters have gradients when the backward begins)."""
        self._calls_again = calls_again
        """True if blocks are called several times in a step, so that some backwards find gradients."""
        self.leaves_gradients = False
        self._freed_keys: set[int] | None = None
        """Keys of those storages of blocks' inputs that were freed when the head ran. None before."""
        self._outside_storages: dict[int, StorageWeakRef] = {}
        """Weak references to the storages of tensors that autograd saves outside the blocks, by address.

        A weak reference keeps the address from being reused, but does not keep the memory alive. Otherwise logits would
        be live throughout the profile.
        """
        self._previous_results: list[TensorNote] = []
        """Tensors that the previous recorded block call returned."""
        self._shared_tensors = SharedTensors([], set(), set(), set())

    def record(self, profiled: ProfiledModel, batch: Batch) -> None:
        """Run one forward, and record every block and the tensors that the rest of the model saves."""
        model = profiled.model
        self.is_sharded = is_sharded(model)
        # An earlier recording may have set later calls of blocks in a step. The strategy below records all calls.
        profiled.installation.expect(profiled.installation.blocks)
        for name, function in profiled.installation.blocks.items():
            function.strategy = RecordingStrategy(name, self)
        state_keys = state_storages(model)
        batch_keys = {storage_key_of(tensor) for _, tensor in argument_tensors((), dict(batch.tensors))}
        self.leaves_gradients = profiled.step.leaves_gradients
        torch.clear_autocast_cache()
        with (
            torch.autograd.graph.saved_tensors_hooks(self._save_outside, refuse_backward),
            profiled.heads.calling(self.note_freed),
        ):
            loss = profiled.forward_loss(batch)
        self.end_forward(state_keys, batch_keys)
        del loss

    def end_forward(self, state_keys: set[int], batch_keys: set[int]) -> None:
        """Record which saved tensors are alive, while the loss keeps the graph that backward will walk alive.

        `state_keys` and `batch_keys` are the storages of the model's state and of the batch.
        """
        if self._freed_keys is None:
            self.note_freed()
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
        recording = ModelRecording.of(
            self.blocks,
            self._shared_tensors,
            self._prices,
            self._memory,
            self._config,
            self.tape_cache,
            self._freed_keys or set(),
        )
        return replace(recording, tile_memory=self.tile_memory)

    @torch.compiler.disable  # inside a compiled model, Dynamo would trace it
    def note_freed(self) -> None:
        inputs = [note for block in self.blocks for _, note in block.holdable_inputs_with_sources()]
        self._freed_keys = {note.key for note in inputs if note.storage.expired()}

    def record_call(
        self, name: str, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run and record one call of a block, and return the call's result.

        If no earlier call ran the same operators, also measure the times of operators and codecs.
        """
        known_shapes = KnownShapes(self.tape_cache.untraceable)
        tiling = self._tilings.get(name)
        # Take the key before the call, as in training: a block may append its auxiliary loss to a list argument.
        key = known_shapes.key(block, fn, args, kwargs, tiling)
        called = in_tiles(block, tiling, fn)
        arguments = {Source("argument", path): tensor for path, tensor in argument_tensors(args, kwargs)}
        recording = Recording(name, block, args, kwargs, self._measurement.rng_use)
        result = self._run(recording, called, key is not None)
        if key is None and known_shapes.leave_out(recording.recorder.function_results):
            key = known_shapes.key(block, fn, args, kwargs, tiling)
        for tensor in arguments.values():
            if tensor.is_leaf and tensor.requires_grad:  # `enable_input_require_grads` makes some, and autograd holds
                self.note_outside_storage(tensor)
        tensors = [*arguments.values(), *block.parameters()]
        states = self._measurement.random_states({tensor.device for tensor in tensors})
        recorder = recording.recorder
        tape = self.tape_cache.verified_tape(recorder)
        if key is None and tape.untrusted is None:
            tape.untrusted = f"Dynamo, which reads the code of blocks, stops: {known_shapes.untraced}"
        if key is not None:
            known_shapes.compare_graph(tape, fn, args)
        graph = known_shapes.graph_of(tape, fn, args) if key is not None and tiling is None else None
        outliers = self._measurement.outliers(tape, recorder.bases, self._config)
        if tape.digest not in self._prices:
            run_again = partial(called, *args)
            self._prices[tape.digest] = self._price(tape, recorder, outliers, run_again, graph)
        errors = self._measurement.gradient_errors(tape, recorder.bases, self._prices[tape.digest], self._config)
        if tiling is not None and tape.digest not in self.tile_memory:
            self.tile_memory[tape.digest] = self._measure_tiles(tape, recorder, tiling, called)
        if key is not None:
            self.tape_cache.remember(tape, key, name)
            known_shapes.add(key, KnownShape(tape, num_calls=2))
        num_results = _num_results(result, arguments.values())
        input_values = [value.index for value in tape.values if tape.is_block_input(value.index)]
        outputs = {} if tape.untrusted else _saved_outputs(recorder, tape, result)
        casts = {} if tape.untrusted else _saved_casts(recorder, tape)
        previous_keys = {note.key for note in self._previous_results}
        notes = {value: TensorNote.of(recorder.bases[value]) for value in input_values}
        internal_storages = _internal_storages(recorder, tape, outputs.keys() | casts.keys())
        slot_refs = recording.references()
        self._release(recording, tape)
        recording.close()
        del recorder, tensors
        if tape.untrusted is None:
            overwrites = any(tape.values[value].overwritten for value in input_values)
            of_block = partial(RepeatedCall.of_block, block, fn, args, tiling, num_results, overwrites)
            repeated = of_block() if graph is None else RepeatedCall.of_graph(*graph, num_results, overwrites)
            forward = repeated if graph is not None and self.trains else of_block(is_forward=True)
            roots = () if forward is repeated else (block, fn)
            self._measure_memory(partial(measure_block, forward, repeated, tape), tape, roots, slot_refs)
            recording.reschedule()
        self.blocks.append(
            RecordedBlock(
                name=name,
                known_shapes=known_shapes,
                tape=tape,
                input_tensors=notes,
                argument_tensors=_one_per_storage(arguments),
                outputs=outputs,
                casts=casts,
                internal_storages=internal_storages,
                slot_refs=slot_refs,
                outliers=outliers,
                errors=errors,
                uses_previous_result=not previous_keys.isdisjoint(map(storage_key_of, arguments.values())),
            )
        )
        self._previous_results = [TensorNote.of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        # Measuring drew random numbers too. The rest of the forward must draw the same numbers as later passes.
        states.restore()
        return result

    def _run(self, recording: Recording, called: Callable[..., Any], has_key: bool) -> Any:
        """Run and record a block's call, and return its result. `has_key` is True if Dynamo has traced the call."""
        return recording.run(called)

    def _release(self, recording: Recording, tape: Tape) -> None:
        """Free the saved tensors of a recorded call, or hand them over to a plan."""
        recording.discard()

    def _price(
        self,
        tape: Tape,
        recorder: Recorder,
        outliers: dict[int, int],
        run_again: Callable[[], Any],
        graph: tuple[Callable[..., Any], tuple[Any, ...]] | None,
    ) -> Prices:
        """Measure the times and codec costs of a recorded call, which `run_again` or the traced `graph` repeats."""
        bases = recorder.bases
        if not tape.values:  # the block returns its arguments unchanged
            return Prices([], [])
        device = bases[0].device
        with NoTrace((recorder.block, run_again), lambda: self._measurement.random_states([device]), SMALL_COPY):
            if tape.untrusted in HIDDEN and not tape.has_collectives:
                return self._measurement.price_call(run_again, device)
            is_alone = tape.untrusted is None and not tape.has_collectives
            return self._measurement.price(tape, bases, self._config, outliers, run_again if is_alone else None)

    def _measure_memory(
        self,
        measure: Callable[..., BlockMemory],
        tape: Tape,
        roots: tuple[Any, ...],
        slot_refs: list[Any],
    ) -> None:
        """Measure the memory of a block's call by `measure`, if no call with the same tape was measured."""
        dead_slots = frozenset(slot for slot, reference in enumerate(slot_refs) if reference() is None)
        states = partial(self._measurement.random_states, [tape.values[0].device] if tape.values else [])
        for has_gradients in {self.leaves_gradients, self.leaves_gradients or self._calls_again}:
            if (tape.digest, has_gradients) in self._memory:
                continue
            memory = BlockMemory()
            if tape.values:
                with NoTrace(roots, states, SMALL_COPY) if roots else nullcontext():
                    memory = measure(dead_slots, self._measurement, has_gradients)
            self._memory[tape.digest, has_gradients] = memory
            self.tape_cache.learn_order(tape, unpack_order(memory.backward))

    def _measure_tiles(
        self, tape: Tape, recorder: Recorder, tiling: Tiling, run_again: Callable[..., Any]
    ) -> dict[str, TileMemory]:
        """Measure the memory of one tile (group of rows) of each module in `tiling` that ran in tiles. The keys are the
        paths of the modules."""
        memory: dict[str, TileMemory] = {}
        for path, rows in tiled_inputs(tape, tiling).items():
            tensor = view(recorder.bases[rows.value], rows)
            states = partial(self._measurement.random_states, [tensor.device])
            with NoTrace((recorder.block, run_again), states, SMALL_COPY):
                tile = measure_tile(recorder.block.get_submodule(path), tensor, self._measurement)
            if tile is not None:
                memory[path] = tile
        return memory

    def _save_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record the storage of a tensor that autograd saves outside the blocks. Used as a saved-tensor hook while
        profiling."""
        self.note_outside_storage(tensor)
        return tensor.detach()

    def note_outside_storage(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage_key(storage) not in self._outside_storages:
            self._outside_storages[storage_key(storage)] = StorageWeakRef(storage)


def state_storages(model: nn.Module) -> set[int]:
    """Return the storages of the model's parameters and buffers, as storage keys.

    Empty tensors are left out: when ZeRO 3 gathers a parameter, it frees the parameter's empty storage, and another
    tensor may get the storage's address, which is its key.
    """
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
    """Return a dict from each saved value that the profiled block computed and returned to a note on the tensor."""
    saved = set(tape.saved_values())
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {value: TensorNote.of(tensor) for tensor in tensors if (value := recorder.made_value(tensor)) in saved}


def _saved_casts(recorder: Recorder, tape: Tape) -> dict[int, TensorNote]:
    """Return a dict from each saved value that the profiled block computed from its parameters alone, such as
    autocast's casts, to a note on the tensor."""
    computed_values = [value for value in tape.saved_values() if tape.values[value].producer is not None]
    return {v: TensorNote.of(recorder.bases[v]) for v in computed_values if is_parameter_cast(tape, v)}


def _internal_storages(recorder: Recorder, tape: Tape, excluded: Set[int]) -> dict[int, StorageWeakRef]:
    """Return the storages of the saved values that the profiled block computed, except for the values in `excluded`. If
    the block runs code whose operators cannot be recorded, the results of this code have an unknown source on the tape,
    and are included too."""
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
