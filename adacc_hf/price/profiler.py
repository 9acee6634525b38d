"""The model profiler (paper, section 3.1): a measured profile, or an estimated one if memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import check_type, settings_in_config
from adacc_hf.price.batch import Batch
from adacc_hf.price.caching_measurement import CachingMeasurement
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.price.measured_profile import measure_profile
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.profile_cache import ProfileCache
from adacc_hf.price.training_step import NoSync, TrainingStep

log = logging.getLogger(__name__)


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
    no_sync: NoSync | None = None,
) -> Profile:
    """Profile the blocks of `model` on `batch`, the keyword arguments of the model's forward, labels included.

    The model must be in train mode, and may be under autocast. Afterwards the state of the model is restored: its
    gradients, buffers and random generators. If a step calls a block several times, because layers share weights or the
    loss calls the model again, the profile lists the block once per call. A block that runs only without gradients
    needs no decision.

    Profiling takes the memory of one block's activations on top of a step in which every block is recomputed.

    Args:
        optimizer: if given, the optimizer's state counts as static memory, and the optimizer's step as a part of the
            training step. Take a training step before, which creates the state, or pass `optimizer_state_bytes`.
        optimizer_step_bytes: temporary bytes of clipping and the optimizer's step, on top of gradients and state.
        optimizer_state_bytes: bytes of state that the optimizer has yet to create, 0 or more.
        gradient_accumulation_steps: micro-batches per step. All are on the device, and later micro-batches start with
            the gradients of the first one.
        prefetched_batches: number of further batches, for later steps, that the loader keeps on the model's device.
        no_sync: context of all micro-batches but the last, if this context postpones the exchange of gradients (the
            `no_sync` of FSDP). Until the exchange, each rank holds whole gradients.
        compute_loss: for a model whose output has no loss, `compute_loss(model, batch)` calls the model and returns the
            loss to train on. `batch` is any mapping that the function needs. The function is called about 8 times.
        measurement: the source of the readings, by default real runs. The measured times and codec costs of real runs
            are cached in the folder that `adacc profiles` shows.

    Raises NoBlocksError for a model without repeated blocks, NestedHooksError if other saved-tensor hooks are active,
    CompiledBlockError if torch.compile compiles the blocks, ChunkedHeadError if the config requires a chunked head that
    the model cannot have, UncalledBlocksError for a batch on which some blocks do not run, ProfilerConflictError on a
    CPU while a torch profiler is active, UnrestorableError for a model whose forward changes state that cannot be
    restored, ValueError for a batch without a loss, and torch.OutOfMemoryError, or a library's own out-of-memory error,
    if the batch does not fit.
    """
    check_type("profile_model: model", model, nn.Module, "pass the torch.nn.Module to train")
    step = TrainingStep(
        optimizer=optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        prefetched_batches=prefetched_batches,
        optimizer_step_bytes=optimizer_step_bytes,
        optimizer_state_bytes=optimizer_state_bytes,
        compute_loss=compute_loss,
        no_sync=no_sync,
    )
    return profile_batch(model, batch, config or AdaccConfig(), step, measurement)


def profile_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: AdaccConfig,
    step: TrainingStep,
    measurement: Measurement | None = None,
) -> Profile:
    """Profile the blocks of `model` on `batch`, a micro-batch of `step`, as `profile_model` describes."""
    measurement = measurement or CachingMeasurement(ProfileCache())
    whole = Batch(batch)
    config = config.for_rows(whole.num_tokens)
    return measure_profile(model, whole, config, step, measurement)
