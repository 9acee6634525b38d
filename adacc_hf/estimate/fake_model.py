"""Model of fake tensors (tensors without memory), whose training step can be traced for the profile of any batch size.

To save time, most of a model's equal blocks can be left out of the trace. `Thinning` then computes the profile of the
whole model from the profile of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from adacc_hf.artifacts.call_names import calls_per_block
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.artifacts.tiles import TILE
from adacc_hf.compact import CompactFactory
from adacc_hf.estimate.adapters import Adapters, lora_model
from adacc_hf.estimate.devices import Device
from adacc_hf.estimate.fake_device import fake_autocast, fake_tensors
from adacc_hf.estimate.fake_measurement import FakeMeasurement, FakeMemoryMeasurement
from adacc_hf.estimate.images import (
    image_model,
    image_size,
    images_per_sequence,
    pixel_values,
    unchecked_placeholders,
)
from adacc_hf.estimate.liger_kernels import check_family, rotary_kernels, use_kernels
from adacc_hf.estimate.model_presets import fresh_model, is_classifier
from adacc_hf.estimate.quantized_weights import Quantization
from adacc_hf.estimate.sequence_parallel import check_attention, check_heads, shared_sequences
from adacc_hf.estimate.static_memory import Sharding
from adacc_hf.estimate.tensor_parallel import shard_model
from adacc_hf.head.chunked_loss import at_most_chunks
from adacc_hf.price.codec_selection import OUTLIER_SHARE
from adacc_hf.price.profiler import profile_model
from adacc_hf.run.block_search import find_blocks
from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    modules_of,
)


@dataclass(frozen=True)
class Precision:
    """Dtypes of the weights and of autocast. `autocast` is None if autocast is off."""

    weights: torch.dtype
    autocast: torch.dtype | None

    @property
    def compute(self) -> torch.dtype:
        return self.autocast or self.weights


PRECISIONS = {
    "fp32": Precision(torch.float32, None),
    "bf16": Precision(torch.bfloat16, None),
    "bf16-amp": Precision(torch.float32, torch.bfloat16),
    "bf16-weights-amp": Precision(torch.bfloat16, torch.bfloat16),
    "fp16-amp": Precision(torch.float32, torch.float16),
}
"""Dtypes by the names that the command line accepts. fp32 and bf16 use one dtype for all tensors. The -amp precisions
use autocast, as the Trainer's bf16=True and fp16=True do. Weights are then float32, or bfloat16 in bf16-weights-amp."""


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
    ranks_per_sequence: int = 1
    """Number of devices that share each sequence, as in DeepSpeed's Ulysses."""
    ranks_per_layer: int = 1
    """Number of devices that share each layer, as in Transformers' tensor parallelism."""
    liger: bool = False
    """True if Liger's kernels run, as with `use_liger_kernel=True` of the Trainer. Stand-ins are traced."""
    image_tokens: int = 0
    """Tokens of each sequence that stand for images. If 0, the batches have no images."""
    outlier_share: float = OUTLIER_SHARE
    adacc: AdaccConfig = field(default_factory=AdaccConfig)

    @property
    def has_master_weights(self) -> bool:
        """True if forward and backward use 16-bit copies of float32 weights."""
        return self.sharding.casts_weights and self.precision.autocast is not None

    def __post_init__(self) -> None:
        self.device.check_dtype(str(self.precision.compute).removeprefix("torch."))
        check_heads(self.config, self.ranks_per_sequence)
        if self.liger:
            check_family(self.config)
        if self.image_tokens:
            image_size(self.config)
            option = "--peft" if self.adapters is not None else "--sp" if self.ranks_per_sequence > 1 else None
            if option is not None:
                raise ValueError(
                    f"--images and --image-tokens are not planned with {option}: leave out one of the options"
                )
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
        self.autocast = None if sharding.is_deepspeed else precision.autocast
        weights = precision.compute if sharding.casts_weights else precision.weights
        dtype = str(weights).removeprefix("torch.")
        self.model = empty_model(workload, dtype)
        check_attention(self.model, workload.ranks_per_sequence)
        self.whole_gradient_bytes = 0
        """Bytes of gradients that a device holds in addition to those of its parameters."""
        if workload.ranks_per_layer > 1:
            num_bytes = shard_model(self.model, workload.ranks_per_layer)
            self.whole_gradient_bytes = 0 if sharding.method == "fsdp" else num_bytes  # FSDP shards each gradient
        _disable_caches(self.model)
        self.model.train()
        self.images_per_sequence = (
            images_per_sequence(self.model, workload.config, workload.image_tokens) if workload.image_tokens else 0
        )
        if workload.liger:
            use_kernels(self.model)
        if workload.compact_rank is not None:
            for layer in CompactFactory()(self.model, rank=workload.compact_rank).layers:
                layer.clear_core()  # the state after the first step
        self._thinning: Thinning | None = None

        named_blocks = find_blocks(self.model, workload.adacc.block_classes)
        self.block_names = [name for name, _ in named_blocks]
        self.blocks = [block for _, block in named_blocks]

    def profile(self, batch_size: int, seq_len: int) -> Profile:
        """Return the profile of a step on `batch_size` sequences of `seq_len` tokens, with every block traced."""
        profile = self._trace(FakeMeasurement, batch_size, seq_len)
        self._thinning = plan_thinning(self.model, profile)
        return profile

    def estimate(self, batch_size: int, seq_len: int, for_policies: bool = True) -> Profile:
        """Return the profile of a step at another batch shape. Only a few of the model's equal blocks are traced.

        Times of the step and of the heads are 0. If `for_policies` is False, the profile contains only the first of the
        config's heads and no tiles, and the trace takes less than half the time. Before the first call, `profile` must
        have been called once, to find the equal blocks.
        """
        assert self._thinning is not None, "call profile() first: it finds the blocks that can be left out"
        with thinned(self.model, self._thinning):
            profile = self._trace(FakeMemoryMeasurement, batch_size, seq_len, for_policies)
        return self._thinning.expand(profile)

    def batch(self, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """Return one device's part of a batch of `batch_size` sequences of `seq_len` tokens, with labels."""
        num_ranks = self.workload.ranks_per_sequence
        ids = torch.zeros((batch_size, -(-seq_len // num_ranks)), dtype=torch.long)
        labels = ids[:, 0] if is_classifier(self.workload.config) else ids
        positions = {} if num_ranks == 1 else {"position_ids": ids.clone()}
        images = {}
        if self.images_per_sequence:
            images = {"pixel_values": pixel_values(self.workload.config, batch_size * self.images_per_sequence)}
        return {"input_ids": ids, "labels": labels.clone(), **positions, **images}

    def _trace(
        self, measurement: type[FakeMeasurement], batch_size: int, seq_len: int, for_policies: bool = True
    ) -> Profile:
        batch, config = self.batch(batch_size, seq_len), self.workload.adacc
        if not for_policies:
            actions = tuple(action for action in config.actions if action != TILE)
            config = replace(config, head=config.heads[0], actions=actions)
        readings = measurement(self.workload.device, self.workload.outlier_share)
        with fake_autocast(self.workload.trace, self.autocast), at_most_chunks(3):
            return profile_model(self.model, batch, config, measurement=readings)


@contextmanager
def fake_model(workload: Workload) -> Iterator[FakeModel]:
    """Create the model of `workload` on fake tensors, which can be traced inside the `with` block.

    Raises FakeDeviceError if fake tensors of the device type are impossible on this machine. Raises AdaccError if the
    model needs inputs other than input_ids and labels, or if its code depends on the values of tensors.
    """
    placeholders = unchecked_placeholders() if workload.image_tokens else nullcontext()
    rotations = rotary_kernels(workload.config) if workload.liger else nullcontext()
    with fake_tensors(workload.trace), shared_sequences(workload.ranks_per_sequence), placeholders, rotations:
        try:
            yield FakeModel(workload)
        except AdaccError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError, TypeError) as error:
            name = type(workload.config).__name__
            reason = str(error).partition("\n")[0][:_MAX_REASON]
            raise AdaccError(
                f"a step of {name}'s model cannot be traced without data ({type(error).__name__}: {reason}): "
                f"profile it with data and pass the saved profile with --profile"
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
    build = image_model if workload.image_tokens else fresh_model
    return build(workload.config, workload.attention, dtype)


# Thinning: trace a model with only a few blocks of each run of equal blocks, and extrapolate the profile of the model.
#
# A block's tape does not depend on the number of equal blocks. Parameters, and the gradients that are live when a
# block's backward starts, are linear in that number. For the head, all casts of parameters that autocast caches until
# forward ends are counted, even if the peak comes later. There the estimate may be too high, but never too low.

TRACED_PER_RUN = 3
"""Number of blocks that are traced in each run (sequence) of equal blocks. Two neighbouring blocks give the increment
per block. A third block is needed, because the last block may differ from the other blocks."""


@dataclass(frozen=True)
class Thinning:
    """Choice of the blocks that a trace of a model leaves out, and extrapolation to the whole model."""

    blocks: tuple[BlockProfile, ...]
    """All blocks of the model, in forward order."""
    dropped: frozenset[str]
    """Names of the blocks that the trace leaves out."""
    missing_bytes: int
    """Bytes of the parameters and buffers of the blocks that the trace leaves out."""

    def expand(self, thin: Profile) -> Profile:
        """Return the profile of the whole model, computed from `thin`, which lacks the blocks left out of the trace."""
        traced_names = [block.name for block in thin.blocks]
        assert traced_names == [block.name for block in self.blocks if block.name not in self.dropped]
        backward = self._backward_bases(
            dict(zip(traced_names, [block.backward_base_bytes for block in thin.blocks], strict=True))
        )
        kinds = self._kinds({block.name: block.kind for block in thin.blocks})
        cached_bytes = {name: _cached_bytes(thin, kinds[name]) for name in self.dropped}
        forward_extra_bytes = self.missing_bytes + sum(cached_bytes.values())
        forward = self._forward_bases({block.name: block.forward_base_bytes for block in thin.blocks}, cached_bytes)
        blocks = [
            BlockProfile(
                name=block.name,
                kind=kinds[block.name],
                forward_base_bytes=forward[block.name],
                backward_base_bytes=backward.by_block[block.name],
            )
            for block in self.blocks
        ]
        heads = [
            (head, self._backward_bases(dict(zip(traced_names, head.backward_base_bytes, strict=True))))
            for head in thin.other_heads
        ]
        return replace(
            thin,
            blocks=tuple(blocks),
            static_bytes=thin.static_bytes + self.missing_bytes,
            outside_peak_bytes=thin.outside_peak_bytes + forward_extra_bytes,
            loss_peak_bytes=thin.loss_peak_bytes + self.missing_bytes,
            tail_peak_bytes=thin.tail_peak_bytes + backward.tail_extra_bytes,
            other_heads=tuple(
                replace(
                    head,
                    outside_peak_bytes=head.outside_peak_bytes + forward_extra_bytes,
                    loss_peak_bytes=head.loss_peak_bytes + self.missing_bytes,
                    tail_peak_bytes=head.tail_peak_bytes + bases.tail_extra_bytes,
                    backward_base_bytes=tuple(bases.by_block.values()),
                )
                for head, bases in heads
            ),
        )

    def _kinds(self, kinds: dict[str, int]) -> dict[str, int]:
        """Return the kind of every block by the block's name. `kinds` contains the kinds of the traced blocks. A block
        left out of the trace gets the kind of the last block in its run (sequence) of equal blocks."""
        return {
            block.name: kinds.get(block.name, kinds[run[-1].name])
            for run in _runs_of_blocks(self.blocks)
            for block in run
        }

    def _forward_bases(self, traced_bases: dict[str, int], cached_bytes: dict[str, int]) -> dict[str, int]:
        """Return the live bytes at the start of each block's forward. `traced_bases` contains these bytes for the
        traced blocks. `cached_bytes` contains the bytes of the casts that autocast caches for each block left out of
        the trace."""
        bases: dict[str, int] = {}
        extra_bytes = self.missing_bytes
        for run in _runs_of_blocks(self.blocks):
            dropped = [block.name for block in run if block.name in self.dropped]
            traced = [block.name for block in run[len(dropped) :]]
            bytes_per_block = cached_bytes[dropped[0]] if dropped else 0
            for position, block in enumerate(run):
                # The model may hold the first block's input, which is then live during all later blocks. Therefore the
                # first block corresponds to the first traced block, other dropped blocks to the second.
                counterpart = max(position - len(dropped), min(position, 1))
                cached_before = (position - counterpart) * bytes_per_block
                bases[block.name] = traced_bases[traced[counterpart]] + extra_bytes + cached_before
            extra_bytes += len(dropped) * bytes_per_block
        return bases

    def _backward_bases(self, traced_bases: dict[str, int]) -> _FakeBackwardBases:
        """Return the live bytes at the start of each block's backward. `traced_bases` contains these bytes for the
        traced blocks."""
        bases: dict[str, int] = {}
        gradient_bytes = 0
        for run in reversed(_runs_of_blocks(self.blocks)):
            names = [block.name for block in run]
            dropped = [name for name in names if name in self.dropped]
            first_traced = traced_bases[names[len(dropped)]]
            bytes_per_block = first_traced - traced_bases[names[len(dropped) + 1]] if dropped else 0
            for name in reversed(names[len(dropped) :]):
                bases[name] = traced_bases[name] + self.missing_bytes + gradient_bytes
            for name in reversed(dropped):
                gradient_bytes += bytes_per_block
                bases[name] = first_traced + self.missing_bytes + gradient_bytes
        in_order = {block.name: bases[block.name] for block in self.blocks}
        return _FakeBackwardBases(in_order, self.missing_bytes + gradient_bytes)


@dataclass(frozen=True)
class _FakeBackwardBases:
    """Live bytes in the backward of a whole model, computed from a trace that leaves out some blocks."""

    by_block: dict[str, int]
    """Live bytes at the start of each block's backward, in forward order of the blocks."""
    tail_extra_bytes: int
    """Bytes that the blocks left out of the trace add at the end of backward: parameters, buffers and gradients."""


def plan_thinning(model: nn.Module, profile: Profile) -> Thinning:
    """Choose the blocks that can be left out of traces of `model`. `profile` is the profile of the whole model.

    No block is left out if the configuration gives layers different types by their index, because removing a layer
    would change the types of other layers. No block is left out either if any block is called more than once.
    """
    types = getattr(getattr(model, "config", None), "layer_types", None)
    is_uniform = len(set(types or ())) < 2 and max(calls_per_block(b.name for b in profile.blocks).values()) == 1
    runs = _runs_of_blocks(profile.blocks) if is_uniform else []
    dropped = [block.name for run in runs for block in run[:-TRACED_PER_RUN]]
    modules = [model.get_submodule(name) for name in dropped]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return Thinning(tuple(profile.blocks), frozenset(dropped), distinct_bytes(tensors))


@contextmanager
def thinned(model: nn.Module, thinning: Thinning) -> Iterator[None]:
    """Remove the blocks that `thinning` leaves out from `model` inside the `with` block."""
    parents = [model.get_submodule(path) for path in {_parent_module(name) for name in thinning.dropped}]
    original_modules = [(parent, dict(modules_of(parent))) for parent in parents]
    for name in thinning.dropped:
        del modules_of(model.get_submodule(_parent_module(name)))[name.rpartition(".")[2]]
    try:
        yield
    finally:
        for parent, modules in original_modules:
            modules_of(parent).clear()
            modules_of(parent).update(modules)


def _cached_bytes(profile: Profile, kind: int) -> int:
    """Return the bytes of the casts that autocast caches for a block of `kind` until the model's forward ends."""
    return sum(value.nbytes for value in profile.kinds[kind].values if value.cached and value.producer is not None)


def _parent_module(name: str) -> str:
    return name.rpartition(".")[0]


def _runs_of_blocks(blocks: Sequence[BlockProfile]) -> list[list[BlockProfile]]:
    """Split `blocks` into runs: consecutive blocks that have the same kind and the same parent module."""
    return [list(run) for _, run in groupby(blocks, key=lambda block: (_parent_module(block.name), block.kind))]
