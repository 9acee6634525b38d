"""The model profiler (paper, section 3.1): a micro-batch is profiled while a step runs on it (price/live_step.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import check_type, settings_in_config
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.price.batch import Batch, TrainingStep
from adacc_hf.price.idle_blocks import ExecutedBlocks, describe_uncalled
from adacc_hf.price.live_step import LiveStep
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import gradient_bytes
from adacc_hf.price.preserved_values import PreservedValues
from adacc_hf.price.tiled_kinds import TiledKinds
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.inputs import block_layout
from adacc_hf.tape.tape_cache import TapeCache, profiled_tapes
from adacc_hf.torch_glue.compat import without_layerdrop
from adacc_hf.torch_glue.distributed import is_sharded, reshard
from adacc_hf.torch_glue.memory import forward_loss
from adacc_hf.torch_glue.private import tree_leaves
from adacc_hf.torch_glue.tensors import gradient_leaves

ComputeLoss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
"""Function of (model, batch), which it may change, that calls the model and returns the loss."""

_profiling_lock = threading.RLock()
"""Lock held while a thread profiles a model: two would distort the times, and draw from the same generators."""


@settings_in_config(AdaccConfig)
def profile_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: AdaccConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    measurement: Measurement | None = None,
    gradient_accumulation_steps: int = 1,
    prefetched_batches: int = 0,
    optimizer_step_bytes: int = 0,
    optimizer_state_bytes: int = 0,
    compute_loss: ComputeLoss | None = None,
) -> Profile:
    """Profile the blocks of `model` on `batch`, the keyword arguments of the model's forward, labels included.

    The model must be in train mode, and may be under autocast. One forward and backward run, in which every block is
    recomputed as under gradient checkpointing. Another one runs if blocks have made tables for later calls, and one if
    modules may run in tiles. With gradient accumulation, zeros stand for the gradients of earlier micro-batches.
    Afterwards gradients, buffers and the default random generators are as before. Python state (counters, lists,
    generators of your own) has changed as in these steps of training: profile a copy of the model if that matters. A
    run of training is profiled by its first step instead (`AdaccSession`), in which nothing runs twice.

    If a step calls a block several times, because layers share weights or the loss calls the model again, the profile
    lists the block once per call. A block that runs only without gradients needs no decision.

    Args:
        optimizer: if given, the optimizer's state counts as static memory, and the optimizer's step as a part of the
            training step. Take a training step before, which creates the state, or pass `optimizer_state_bytes`.
        optimizer_step_bytes: temporary bytes of clipping and the optimizer's step, on top of gradients and state.
        optimizer_state_bytes: bytes of state that the optimizer has yet to create, 0 or more.
        gradient_accumulation_steps: micro-batches per step. All are on the device, and later micro-batches start with
            the gradients of the first one.
        prefetched_batches: number of further batches, for later steps, that the loader keeps on the model's device.
        compute_loss: for a model whose output has no loss, `compute_loss(model, batch)` calls the model and returns the
            loss to train on. `batch` is any mapping that the function needs.
        measurement: the source of the readings, by default real runs.

    Raises NoBlocksError for a model without repeated blocks, NestedHooksError if other saved-tensor hooks are active,
    CompiledBlockError if torch.compile compiles the blocks, ChunkedHeadError if the config requires a chunked head that
    the model cannot have, UncalledBlocksError for a batch on which some blocks do not run, ProfilerConflictError on a
    CPU while a torch profiler is active, UnrestorableError for a model whose forward changes parameters in place,
    ValueError for a batch without a loss, and torch.OutOfMemoryError, or a library's own out-of-memory error,
    if the batch does not fit.
    """
    check_type("profile_model: model", model, nn.Module, "pass the torch.nn.Module to train")
    step = TrainingStep(
        optimizer=optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        prefetched_batches=prefetched_batches,
        optimizer_step_bytes=optimizer_step_bytes,
        optimizer_state_bytes=optimizer_state_bytes,
    )
    step.check()
    whole = Batch(batch)
    _check_trainable(model, whole)
    called = model if compute_loss is None else partial(_output_with_loss, compute_loss, model)
    run = partial(forward_loss, called, whole.tensors)
    config = (config or AdaccConfig()).for_rows(whole.num_tokens)
    measurement = measurement or Measurement()
    devices = {parameter.device for parameter in model.parameters()}
    static_bytes = partial(measurement.static_bytes, model, whole.tensors, optimizer)
    own_bytes = static_bytes() - gradient_bytes(model)
    with _profiling_lock, without_layerdrop(model):
        installation = Installation(model, config.block_classes)
        try:
            with PreservedValues(model, measurement.random_states(devices)) as values:
                aside_bytes = static_bytes() - own_bytes  # of gradients, which are set aside
                return _Profiler(installation, whole, config, step, measurement, run, values, aside_bytes).profile()
        finally:
            installation.remove()
            reshard(model)


def _output_with_loss(compute_loss: ComputeLoss, model: nn.Module, **batch: Any) -> SimpleNamespace:
    return SimpleNamespace(loss=compute_loss(model, batch))


@dataclass(frozen=True)
class _Profiler:
    """A model and a batch to profile. `run` runs a forward, and returns its loss."""

    installation: Installation
    batch: Batch
    config: AdaccConfig
    step: TrainingStep
    measurement: Measurement
    run: Callable[[], torch.Tensor]
    values: PreservedValues
    aside_bytes: int

    def profile(self) -> Profile:
        """Record a step, and another one if the blocks have filled tables that every later forward reads.

        Raises UncalledBlocksError if the step does not call all blocks.
        """
        modules, tape_cache = self.installation.modules, TapeCache(self.measurement.verify)
        tape_cache.expect_same_orders(profiled_tapes(self.installation.model))
        layouts = [block_layout(block) for block in modules.values()]
        with ExecutedBlocks(modules) as executed:
            live = self._record(tape_cache)
        missing = [name for name in modules if name not in executed.names or not live.called]
        if missing:
            raise UncalledBlocksError(describe_uncalled(self.installation, missing, "with this batch", executed))
        if layouts != [block_layout(block) for block in modules.values()]:
            live = self._record(tape_cache)
        profile = live.profile()
        tiles = TiledKinds(profile, live.recording, self.installation, self.config)
        if tiles.tilings:
            profile = tiles.added(self._record(tape_cache, tiles.tilings).recording)
        profiled_tapes(self.installation.model).take(tape_cache)
        return profile

    def _record(self, tape_cache: TapeCache, tilings: Mapping[str, Tiling] | None = None) -> LiveStep:
        """Run a forward and backward, record them, and restore the buffers and the generators."""
        model, measurement = self.installation.model, self.measurement
        model.zero_grad(set_to_none=True)
        if self.step.gradient_accumulation_steps > 1:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        repeats = not is_sharded(model)
        live = LiveStep(self.installation, self.config, measurement, tape_cache, None, tilings, repeats)
        torch.clear_autocast_cache()
        with measurement.clock() if tilings is None else nullcontext():  # no times are read in tiles
            try:
                live.begin(self.batch, self.step, self.aside_bytes)
                loss = self.run()
                self.values.set_gradients_aside(gradient_leaves([loss]))
                live.leave_forward(loss)
                live.end_forward()
                measurement.backward(loss)
                del loss
                live.end()
            finally:
                live.cancel()
        self.values.start_over()
        return live


def _check_trainable(model: nn.Module, batch: Batch) -> None:
    device, tensors = next(model.parameters()).device, batch.tensors
    if device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on device='meta', which has no memory: load it to cpu or cuda first "
            f"(from_pretrained, to_empty), or plan without a device with `adacc plan`"
        )
    if not model.training:
        raise ValueError(f"{type(model).__name__} is in eval mode: call model.train() before profiling")
    problem = None
    if not isinstance(tensors, Mapping):
        problem = f"has type {type(tensors).__name__}"
    elif all(isinstance(leaf, (int, float, str)) for leaf in tree_leaves(dict(tensors))):
        types = (f"{name!r} has type {type(value).__name__}" for name, value in tensors.items())
        problem = f"has no tensors ({next(types)})" if tensors else "is empty"
    if problem is not None:
        raise ValueError(
            f"batch {problem}: give a dict of the model's keyword arguments as tensors, labels included, such as "
            f"{{'input_ids': ids, 'labels': ids}}"
        )
