"""A model without memory, thinned to a few blocks, and its profile for any batch, by tracing a training step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adacc_hf.artifacts.call_names import num_calls
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.compact import CompactFactory
from adacc_hf.estimate.devices import Device
from adacc_hf.estimate.fake_device import fake_autocast, fake_tensors
from adacc_hf.estimate.fake_measurement import FakeMeasurement, FakeMemoryMeasurement
from adacc_hf.estimate.model_presets import fresh_model, is_classifier
from adacc_hf.estimate.static_memory import Sharding
from adacc_hf.head.chunked_loss import at_most_chunks
from adacc_hf.price.codec_selection import OUTLIER_SHARE
from adacc_hf.price.profiler import profile_model
from adacc_hf.run.blocks import find_blocks
from adacc_hf.torch_glue.memory import distinct_bytes
from adacc_hf.torch_glue.private import (
    DataDependentOutputException,
    buffers_of,
    modules_of,
    parameters_of,
    unset_fake_temporarily,
)


@dataclass(frozen=True)
class Precision:
    """A dtype to train in."""

    weights: torch.dtype
    autocast: torch.dtype | None

    @property
    def compute(self) -> torch.dtype:
        return self.autocast or self.weights


PRECISIONS = {
    "fp32": Precision(torch.float32, None),
    "bf16": Precision(torch.bfloat16, None),
    "bf16-amp": Precision(torch.float32, torch.bfloat16),
    "fp16-amp": Precision(torch.float32, torch.float16),
}
"""fp32 and bf16 hold everything in that dtype; -amp is float32 with autocast, Trainer's bf16=True and fp16=True."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA's adapters, where None is PEFT's default."""

    rank: int | None = None
    targets: tuple[str, ...] | None = None
    """Names of the layers that get one; PEFT's default depends on the architecture."""
    dropout: float | None = None
    dtype: str | None = None
    """PEFT's default is float32, also where the model's weights have 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained how, but for the batch."""

    config: PretrainedConfig
    device: Device
    precision: Precision
    attention: str = "sdpa"
    adapters: Adapters | None = None
    """LoRA's adapters, which are trained alone; None without."""
    compact_rank: float | int | None = None
    """The rank that CompAct trains the blocks' linear layers in, as `CompactFactory` takes it; None without it."""
    trace: str = "cuda"
    """Device type whose decisions torch takes."""
    sharding: Sharding = field(default_factory=Sharding)
    outlier_share: float = OUTLIER_SHARE
    adacc: AdaccConfig = field(default_factory=AdaccConfig)

    @property
    def has_master_weights(self) -> bool:
        """Whether what is computed with are 16-bit copies of float32 weights."""
        return self.sharding.casts_weights and self.precision.autocast is not None

    def __post_init__(self) -> None:
        dtype = str(self.precision.compute).removeprefix("torch.")
        if dtype not in self.device.flops:
            raise ValueError(
                f"--device={self.device.name} cannot train in {dtype}: choose another --dtype, it has "
                f"{', '.join(self.device.flops)}"
            )


class FakeModel:
    """A workload's model, to be traced. Made by `fake_model`."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        sharding, precision = workload.sharding, workload.precision
        self.autocast = None if sharding.is_deepspeed else precision.autocast
        weights = precision.compute if sharding.casts_weights else precision.weights
        dtype = str(weights).removeprefix("torch.")
        self.model = _model(workload, dtype)
        self.model.config.use_cache = False
        self.model.train()
        if workload.compact_rank is not None:
            for layer in CompactFactory()(self.model, rank=workload.compact_rank).layers:
                layer.let_go()  # as from the first step on
        self._thinning: Thinning | None = None

        found = find_blocks(self.model, workload.adacc.block_classes)
        self.block_names = [name for name, _ in found]
        self.blocks = [block for _, block in found]

    def profile(self, batch_size: int, seq_len: int) -> Profile:
        """The profile of a step on `batch_size` sequences of `seq_len` tokens, every block traced."""
        profile = self._trace(FakeMeasurement, batch_size, seq_len)
        self._thinning = plan_thinning(self.model, profile)
        return profile

    def estimate(self, batch_size: int, seq_len: int) -> Profile:
        """The same, but for the times of the step and of the heads, from a few blocks of each run of equal ones.

        Call `profile` once before, which tells blocks that are equal.
        """
        assert self._thinning is not None, "profile() finds what can be left out"
        with thinned(self.model, self._thinning):
            profile = self._trace(FakeMemoryMeasurement, batch_size, seq_len)
        return self._thinning.expand(profile)

    def batch(self, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
        """`batch_size` sequences of `seq_len` tokens with their labels."""
        ids = torch.zeros((batch_size, seq_len), dtype=torch.long)
        labels = ids[:, 0] if is_classifier(self.workload.config) else ids
        return {"input_ids": ids, "labels": labels.clone()}

    def _trace(self, measurement: type[FakeMeasurement], batch_size: int, seq_len: int) -> Profile:
        batch = self.batch(batch_size, seq_len)
        readings = measurement(self.workload.device, self.workload.outlier_share)
        with fake_autocast(self.workload.trace, self.autocast), at_most_chunks(3):
            return profile_model(self.model, batch, self.workload.adacc, measurement=readings)


@contextmanager
def fake_model(workload: Workload) -> Iterator[FakeModel]:
    """The model of `workload`, to be traced while the context is open.

    Raises FakeDeviceError where tensors on the device cannot be imitated, AdaccError for a model that needs more than
    input_ids and labels, or that reads data.
    """
    with fake_tensors(workload.trace):
        try:
            yield FakeModel(workload)
        except (DataDependentOutputException, TypeError) as error:
            name = type(workload.config).__name__
            raise AdaccError(
                f"a step of {name}'s language model cannot be traced without data ({type(error).__name__}: {error}): "
                f"profile it on a GPU and give the file with --profile"
            ) from error


def _model(workload: Workload, dtype: str) -> PreTrainedModel:
    if workload.adapters is not None:
        return _lora_model(workload.config, workload.attention, dtype, workload.adapters)
    return fresh_model(workload.config, workload.attention, dtype)


def _lora_model(config: PretrainedConfig, attention: str, dtype: str, adapters: Adapters) -> PreTrainedModel:
    """The model with PEFT's LoRA adapters."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise AdaccError("--peft=lora needs the package peft: pip install peft") from error
    task = "SEQ_CLS" if is_classifier(config) else "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
    options: dict[str, Any] = {"r": adapters.rank, "target_modules": adapters.targets, "lora_dropout": adapters.dropout}
    # On meta first: PEFT moves new adapters to their layer's device, and fake tensors refuse that.
    with unset_fake_temporarily(), torch.device("meta"):
        model = fresh_model(config, attention, dtype)
        transposed = any(isinstance(module, Conv1D) for module in model.modules())  # PEFT sees it too, and warns
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        lora = LoraConfig(task_type=task, fan_in_fan_out=transposed, **given)
        with warnings.catch_warnings():  # PEFT reads a property that Transformers renames: nothing to a user
            warnings.simplefilter("ignore", FutureWarning)
            try:
                adapted = get_peft_model(model, lora, low_cpu_mem_usage=True)
            except ValueError as error:
                if adapters.targets is None:
                    raise
                raise ValueError(
                    f"--lora-targets={' '.join(adapters.targets)} cannot have adapters: {error}"
                ) from error
        if adapters.dtype is not None:
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(getattr(torch, adapters.dtype))
    _from_meta(adapted)
    return cast("PreTrainedModel", adapted)  # it passes on what it has not itself


def _from_meta(model: nn.Module) -> None:
    """Put new tensors on the default device in place of those on meta; one that is there twice stays one."""
    new: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in new:
                    tensor = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, nn.Parameter)
                    new[id(old)] = nn.Parameter(tensor, requires_grad=old.requires_grad) if is_parameter else tensor
                tensors[name] = new[id(old)]


# A model with only a few blocks of each run of equal ones, and the profile of the whole from the profile of that.
#
# A block's tape does not depend on how many of its like there are. What does is linear in their number: parameters, and
# the gradients that are there when a block's backward starts. In the head, all casts of parameters that autocast keeps
# until forward ends are counted, though the peak may come after: there the estimate may be too high, never too low.

KEPT = 3
"""Blocks of a run that are traced: from two neighbours follows what one more adds, but the last may be special."""


@dataclass(frozen=True)
class Thinning:
    """Which blocks are left out, and the profile of the whole model that the others are to give."""

    blocks: tuple[BlockProfile, ...]
    """All blocks, in forward order."""
    dropped: frozenset[str]
    missing_bytes: int
    """Parameters and buffers of what is left out."""

    def expand(self, thin: Profile) -> Profile:
        """The profile of the whole model from that of the thinned one."""
        kept = [block.name for block in thin.blocks]
        assert kept == [block.name for block in self.blocks if block.name not in self.dropped]
        own = self._bases(dict(zip(kept, [block.backward_base_bytes for block in thin.blocks], strict=True)))
        kinds = self._kinds({block.name: block.kind for block in thin.blocks})
        cached = {name: _cached_bytes(thin, kinds[name]) for name in self.dropped}
        held = self.missing_bytes + sum(cached.values())
        forward = self._forward_bases({block.name: block.forward_base_bytes for block in thin.blocks}, cached)
        blocks = [
            BlockProfile(
                name=block.name,
                kind=kinds[block.name],
                forward_base_bytes=forward[block.name],
                backward_base_bytes=own.of_block[block.name],
            )
            for block in self.blocks
        ]
        heads = [
            (head, self._bases(dict(zip(kept, head.backward_base_bytes, strict=True)))) for head in thin.other_heads
        ]
        return replace(
            thin,
            blocks=tuple(blocks),
            static_bytes=thin.static_bytes + self.missing_bytes,
            outside_peak_bytes=thin.outside_peak_bytes + held,
            loss_peak_bytes=thin.loss_peak_bytes + self.missing_bytes,
            tail_peak_bytes=thin.tail_peak_bytes + own.added_at_end,
            other_heads=tuple(
                replace(
                    head,
                    outside_peak_bytes=head.outside_peak_bytes + held,
                    loss_peak_bytes=head.loss_peak_bytes + self.missing_bytes,
                    tail_peak_bytes=head.tail_peak_bytes + bases.added_at_end,
                    backward_base_bytes=tuple(bases.of_block.values()),
                )
                for head, bases in heads
            ),
        )

    def _kinds(self, kinds: dict[str, int]) -> dict[str, int]:
        """The kind of every block; one that is left out is of the kind of its run."""
        return {block.name: kinds.get(block.name, kinds[run[-1].name]) for run in _runs(self.blocks) for block in run}

    def _forward_bases(self, bases: dict[str, int], cached: dict[str, int]) -> dict[str, int]:
        """What is live when each block's forward starts, from the same of the blocks that are kept, and from what
        autocast keeps of each one that is left out."""
        found: dict[str, int] = {}
        added = self.missing_bytes
        for run in _runs(self.blocks):
            dropped = [block.name for block in run if block.name in self.dropped]
            kept = [block.name for block in run[len(dropped) :]]
            of_each = cached[dropped[0]] if dropped else 0
            for position, block in enumerate(run):
                # The model may hold what its first block is given: from the second one on that is live besides.
                like = max(position - len(dropped), min(position, 1))
                found[block.name] = bases[kept[like]] + added + (position - like) * of_each
            added += len(dropped) * of_each
        return found

    def _bases(self, bases: dict[str, int]) -> _Bases:
        """What is live when each block's backward starts, from the same of the blocks that are kept."""
        found: dict[str, int] = {}
        gradients = 0
        for run in reversed(_runs(self.blocks)):
            names = [block.name for block in run]
            dropped = [name for name in names if name in self.dropped]
            first_kept = bases[names[len(dropped)]]
            per_block = first_kept - bases[names[len(dropped) + 1]] if dropped else 0
            for name in reversed(names[len(dropped) :]):
                found[name] = bases[name] + self.missing_bytes + gradients
            for name in reversed(dropped):
                gradients += per_block
                found[name] = first_kept + self.missing_bytes + gradients
        in_order = {block.name: found[block.name] for block in self.blocks}
        return _Bases(in_order, self.missing_bytes + gradients)


@dataclass(frozen=True)
class _Bases:
    of_block: dict[str, int]
    """In forward order."""
    added_at_end: int
    """What the blocks that are left out add when backward is over."""


def plan_thinning(model: nn.Module, profile: Profile) -> Thinning:
    """What can be left out of `model`, whose whole profile is `profile`.

    Nothing where layers are of several types by their number, since leaving some out would change the types of others,
    and nothing where blocks are called again.
    """
    types = getattr(getattr(model, "config", None), "layer_types", None)
    is_alike = len(set(types or ())) < 2 and max(num_calls(b.name for b in profile.blocks).values()) == 1
    runs = _runs(profile.blocks) if is_alike else []
    dropped = [block.name for run in runs for block in run[:-KEPT]]
    modules = [model.get_submodule(name) for name in dropped]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return Thinning(tuple(profile.blocks), frozenset(dropped), distinct_bytes(tensors))


@contextmanager
def thinned(model: nn.Module, thinning: Thinning) -> Iterator[None]:
    """While open, the blocks that `thinning` leaves out are not in `model`."""
    parents = [model.get_submodule(path) for path in {_parent(name) for name in thinning.dropped}]
    before = [(parent, dict(modules_of(parent))) for parent in parents]
    for name in thinning.dropped:
        del modules_of(model.get_submodule(_parent(name)))[name.rpartition(".")[2]]
    try:
        yield
    finally:
        for parent, modules in before:
            modules_of(parent).clear()
            modules_of(parent).update(modules)


def _cached_bytes(profile: Profile, kind: int) -> int:
    """What autocast keeps of one block until the whole forward ends."""
    return sum(value.nbytes for value in profile.kinds[kind].values if value.cached and value.producer is not None)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _runs(blocks: Sequence[BlockProfile]) -> list[list[BlockProfile]]:
    """Neighbours of one kind in one list of layers."""
    return [list(run) for _, run in groupby(blocks, key=lambda block: (_parent(block.name), block.kind))]
