"""A model that is prepared to be profiled, and restored afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.price.batch import Batch
from adacc_hf.price.heads import HeadProfiler, ModelWithLoss
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.compat import without_layerdrop
from adacc_hf.torch_glue.distributed import exchanged_gradients, reshard
from adacc_hf.torch_glue.memory import distinct_bytes, forward_loss
from adacc_hf.torch_glue.no_trace import NoTrace
from adacc_hf.torch_glue.private import tree_leaves

_profiling_lock = threading.RLock()
"""Lock held while a thread profiles a model. Profiling by a second thread at the same time would distort the times, and
draw from the same random generators."""


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """A model whose blocks are wrapped to be profiled. Each run of the profiler starts from the same state."""

    model: nn.Module
    """The model itself, or a wrapper that adds the loss to the model's output."""
    step: TrainingStep
    config: AdaccConfig
    measurement: Measurement
    installation: Installation
    heads: HeadProfiler
    no_trace: NoTrace
    base_bytes: int
    """Bytes live between steps without a batch: parameters, buffers, optimizer state, and other tensors on a GPU."""
    other_batches_bytes: int
    """Bytes of the step's other micro-batches and of prefetched batches."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward_loss(self, batch: Batch) -> torch.Tensor:
        """Run one forward, and return its loss."""
        return forward_loss(self.model, batch.tensors)


@contextmanager
def profiled_model(
    model: nn.Module,
    batch: Batch,
    config: AdaccConfig,
    step: TrainingStep,
    measurement: Measurement,
) -> Iterator[ProfiledModel]:
    """Prepare `model` for runs on `batch` and its parts inside the `with` block, and restore the model at the end.

    Raises the errors that `profile_model` lists for a model, a batch and settings that cannot be profiled.
    """
    _check_trainable(model, batch)
    step.check()
    base_bytes = _base_bytes(model, batch, step, measurement)
    devices = {parameter.device for parameter in model.parameters()}
    with _profiling_lock, without_layerdrop(model), exchanged_gradients(model):
        installation = Installation(model, config.block_classes)
        try:
            roots = (model, step.compute_loss, batch.tensors)
            with (
                HeadProfiler(model, config) as heads,
                NoTrace(roots, lambda: measurement.random_states(devices)) as no_trace,
            ):
                installation.on_step = no_trace.start_over
                yield ProfiledModel(
                    model=model if step.compute_loss is None else ModelWithLoss(model, step.compute_loss),
                    step=step,
                    config=config,
                    measurement=measurement,
                    installation=installation,
                    heads=heads,
                    no_trace=no_trace,
                    base_bytes=base_bytes,
                    other_batches_bytes=step.other_batches_bytes(batch.nbytes),
                )
        finally:
            installation.remove()
            reshard(model)


def _base_bytes(model: nn.Module, batch: Batch, step: TrainingStep, measurement: Measurement) -> int:
    """Return the bytes live between steps, without the batch and without gradients. Gradients are left out, because a
    step starts without gradients, and existing gradients are set aside while the model is profiled."""
    device = next(model.parameters()).device
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.device == device]
    static_bytes = measurement.static_bytes(model, batch.tensors, step.optimizer)
    return static_bytes - distinct_bytes(gradients) - batch.nbytes


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
