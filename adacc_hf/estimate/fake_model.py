"""Model of fake tensors (tensors without memory), whose training step is traced for the profile of a batch size."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.adapters import Adapters, Quantization, lora_model
from adacc_hf.estimate.devices import Device
from adacc_hf.estimate.fake_device import fake_autocast, fake_tensors
from adacc_hf.estimate.fake_measurement import FakeMeasurement
from adacc_hf.estimate.images import image_size, pixel_values, tokens_per_image, unchecked_placeholders
from adacc_hf.estimate.presets import fresh_model, is_classifier
from adacc_hf.estimate.static_memory import Precision, Sharding
from adacc_hf.estimate.thinning import Thinning
from adacc_hf.head.chunked_loss import at_most_chunks
from adacc_hf.price.profiler import profile_model
from adacc_hf.run.block_search import find_blocks
from adacc_hf.torch_glue.private import DataDependentOutputException, DynamicOutputShapeException

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, device and training settings of a run, without batch size and sequence length."""

    config: PretrainedConfig
    device: Device
    precision: Precision
    attention: str | None = None
    """Attention implementation, "sdpa" or "eager". None for Transformers' default: sdpa if the model supports it, else
    eager."""
    adapters: Adapters | None = None
    """LoRA adapters. If set, only the adapters are trained. If None, the whole model is trained."""
    quantization: Quantization | None = None
    """Format of 4-bit weights, which need `adapters`. None for weights in the precision's dtype."""
    compact_rank: float | int | None = None
    """Rank of the random subspaces in which CompAct trains the blocks' linear layers (see `CompactFactory`). None
    without CompAct."""
    trace: str = "cuda"
    """Device type ("cuda" or "cpu") that the traced fake tensors have. Torch's choice of kernels depends on it."""
    sharding: Sharding = field(default_factory=Sharding)
    adacc: AdaccConfig = field(default_factory=AdaccConfig)
    images: int = 0
    """Number of images in each sequence, in a vision-language model."""

    @property
    def has_master_weights(self) -> bool:
        """True if forward and backward use 16-bit copies of float32 weights."""
        return self.sharding.casts_weights and self.precision.autocast is not None

    def __post_init__(self) -> None:
        self.device.check_dtype(self.precision.compute)
        if self.images:
            image_size(self.config)
            if self.adapters is not None:
                raise ValueError("--images is not planned with --peft: leave out one of the two")
        if self.quantization is not None and self.adapters is None:
            raise ValueError("weights of 4 bits cannot be trained: add --peft lora, or plan unquantized weights")
        if self.quantization is not None and self.sharding.method not in ("none", "ddp"):
            raise ValueError(
                f"--{self.sharding.method} is not planned with weights of 4 bits: choose --ddp or a single device"
            )


_MAX_REASON = 120
"""Maximum number of characters of another library's error message that an error of this module quotes."""


class FakeModel:
    """Model of a workload on fake tensors (tensors without memory), ready to be traced. Create one with
    `fake_model`."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        sharding, precision = workload.sharding, workload.precision
        casts = precision.autocast is not None and not sharding.is_deepspeed
        self.autocast: torch.dtype | None = getattr(torch, precision.compute) if casts else None
        self.model = empty_model(workload, precision.compute if sharding.casts_weights else precision.weights)
        _disable_caches(self.model)
        self.model.train()
        self.image_tokens = 0
        """Number of tokens of each sequence that stand for images."""
        if workload.images:
            self.image_tokens = workload.images * tokens_per_image(self.model, workload.config)
        if workload.compact_rank is not None:
            from adacc_hf.compact import CompactFactory  # which imports Transformers' Trainer

            for layer in CompactFactory()(self.model, rank=workload.compact_rank).layers:
                layer.clear_core()  # the state after the first step
        named_blocks = find_blocks(self.model, workload.adacc.block_classes)
        self.block_names = [name for name, _ in named_blocks]
        self.blocks = [block for _, block in named_blocks]
        self.thinning = Thinning(self.model, dict(named_blocks))
        """Choice of the blocks that traces leave out."""

    def profile(self, batch_size: int, seq_len: int) -> Profile:
        """Return the profile of a step on `batch_size` sequences of `seq_len` tokens.

        Of each run of equal blocks, a few are traced. If they turn out to run different operators, all are traced.
        """
        with self.thinning.applied():
            profile, backward_ms = self._trace(batch_size, seq_len)
        if self.thinning.is_confirmed_by(profile):
            return self.thinning.expand(profile, backward_ms)
        log.info("tracing every block, because blocks with equal settings run different operators")
        self.thinning = Thinning(self.model, {})
        return self._trace(batch_size, seq_len)[0]

    def batch(self, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Return a batch of `batch_size` sequences of `seq_len` tokens, with labels. Raises ValueError if the images
        leave no room for text."""
        if seq_len <= self.image_tokens:
            raise ValueError(
                f"the images' {self.image_tokens} tokens must be fewer than --seq-len={seq_len}, which counts the "
                f"tokens of images and of text: raise --seq-len, or set a smaller --images"
            )
        ids = torch.zeros((batch_size, seq_len), dtype=torch.long)
        labels = ids[:, 0] if is_classifier(self.workload.config) else ids
        images = {}
        if self.workload.images:
            images = {"pixel_values": pixel_values(self.workload.config, batch_size * self.workload.images)}
        return {"input_ids": ids, "labels": labels.clone(), **images}

    def _trace(self, batch_size: int, seq_len: int) -> tuple[Profile, dict[str, float]]:
        """Return the profile of the present blocks, and the milliseconds of each block's backward."""
        measurement = FakeMeasurement(self.workload.device)
        with fake_autocast(self.workload.trace, self.autocast), at_most_chunks(3):
            profile = profile_model(
                self.model, self.batch(batch_size, seq_len), self.workload.adacc, measurement=measurement
            )
        return profile, measurement.backward_ms


@contextmanager
def fake_model(workload: Workload) -> Iterator[FakeModel]:
    """Create the model of `workload` on fake tensors, which can be traced inside the `with` block.

    Raises FakeDeviceError if fake tensors of the device type are impossible on this machine. Raises AdaccError if the
    model needs inputs other than input_ids and labels, or if its code depends on the values of tensors.
    """
    placeholders = unchecked_placeholders() if workload.images else nullcontext()
    with fake_tensors(workload.trace), placeholders:
        try:
            yield FakeModel(workload)
        except AdaccError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError, TypeError) as error:
            name = type(workload.config).__name__
            reason = str(error).partition("\n")[0][:_MAX_REASON]
            raise AdaccError(
                f"a step of {name}'s model cannot be traced without data ({type(error).__name__}: {reason}): "
                f"train some steps with data under `adacc run`, and read the prediction in its log"
            ) from error


def _disable_caches(model: nn.Module) -> None:
    """Disable key-value caches in all parts of a model. T5's decoder, for example, has a configuration of its own."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = False


def empty_model(workload: Workload, dtype: str) -> PreTrainedModel:
    """Return a model of `workload` with new weights of `dtype`, on fake tensors inside `fake_tensors`."""
    if workload.adapters is not None:
        return lora_model(workload.config, workload.attention, dtype, workload.adapters, workload.quantization)
    # The values of some vision towers are checked while they are drawn, and fake tensors have none.
    with no_init_weights() if workload.images else nullcontext():
        return fresh_model(workload.config, workload.attention, dtype, has_images=workload.images > 0)
