"""A model without memory, and its profile for any batch, by tracing a training step on tensors without memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from adacc_hf.ahead.devices import Device
from adacc_hf.ahead.fake_device import fake_autocast, fake_tensors
from adacc_hf.ahead.fake_instruments import FakeInstruments, FakeMemoryInstruments
from adacc_hf.ahead.model_presets import fresh_model
from adacc_hf.ahead.static_memory import Sharding
from adacc_hf.ahead.thin_model import Thinning, plan_thinning, thinned
from adacc_hf.blocks import find_blocks
from adacc_hf.config import AdaccConfig
from adacc_hf.errors import AdaccError
from adacc_hf.head.chunked_loss import at_most_chunks
from adacc_hf.profile import Profile
from adacc_hf.profiler import profile_model
from adacc_hf.profiling.codec_options import OUTLIER_SHARE


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
class Workload:
    """What is trained how, but for the batch."""

    config: PretrainedConfig
    device: Device
    precision: Precision
    attention: str = "sdpa"
    peft: str | None = None
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
        make = _lora_model if workload.peft == "lora" else fresh_model
        self.model: nn.Module = make(workload.config, workload.attention, dtype)
        self.model.config.use_cache = False
        self.model.train()
        self._thinning: Thinning | None = None

        found = find_blocks(self.model, workload.adacc.block_classes)
        self.block_names = [name for name, _ in found]
        self.blocks = [block for _, block in found]

    def profile(self, batch_size: int, seq_len: int) -> Profile:
        """The profile of a step on `batch_size` sequences of `seq_len` tokens, every block traced."""
        profile = self._trace(FakeInstruments, batch_size, seq_len)
        self._thinning = plan_thinning(self.model, profile)
        return profile

    def estimate(self, batch_size: int, seq_len: int) -> Profile:
        """The same, but for the times of the step and of the heads, from a few blocks of each run of equal ones.

        Call `profile` once before, which tells blocks that are equal.
        """
        assert self._thinning is not None, "profile() finds what can be left out"
        with thinned(self.model, self._thinning):
            profile = self._trace(FakeMemoryInstruments, batch_size, seq_len)
        return self._thinning.expand(profile)

    def _trace(self, instruments: type[FakeInstruments], batch_size: int, seq_len: int) -> Profile:
        ids = torch.zeros((batch_size, seq_len), dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids.clone()}
        is_plain = self.workload.adacc.heads[0] == "plain"
        readings = instruments(self.workload.device, self.workload.outlier_share, times_measured=is_plain)
        with fake_autocast(self.workload.trace, self.autocast), at_most_chunks(3):
            return profile_model(self.model, batch, self.workload.adacc, instruments=readings)


@contextmanager
def fake_model(workload: Workload) -> Iterator[FakeModel]:
    """The model of `workload`, to be traced while the context is open.

    Raises FakeDeviceError where tensors on the device cannot be imitated, AdaccError for a model that needs more than
    input_ids and labels, or that reads data.
    """
    with fake_tensors(workload.trace):
        try:
            yield FakeModel(workload)
        except (torch._subclasses.fake_tensor.DataDependentOutputException, TypeError) as error:
            name = type(workload.config).__name__
            raise AdaccError(
                f"a step of {name}'s language model cannot be traced without data ({type(error).__name__}: {error}): "
                f"profile it on a GPU and give the file with --profile"
            ) from error


def _lora_model(config: PretrainedConfig, attention: str, dtype: str) -> nn.Module:
    """The model with PEFT's LoRA adapters, at PEFT's defaults for its architecture."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise AdaccError("--peft=lora needs the package peft: pip install peft") from error
    task = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
    # On meta first: PEFT moves new adapters to their layer's device, and fake tensors refuse that.
    with unset_fake_temporarily(), torch.device("meta"):
        model = fresh_model(config, attention, dtype)
        transposed = any(isinstance(module, Conv1D) for module in model.modules())  # PEFT sees it too, and warns
        lora = LoraConfig(task_type=task, fan_in_fan_out=transposed)
        with warnings.catch_warnings():  # PEFT reads a property that Transformers renames: nothing to a user
            warnings.simplefilter("ignore", FutureWarning)
            adapted = get_peft_model(model, lora, low_cpu_mem_usage=True)
    _from_meta(adapted)
    return adapted


def _from_meta(model: nn.Module) -> None:
    """Put new tensors on the default device in place of those on meta; one that is there twice stays one."""
    new: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in new:
                    tensor = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, nn.Parameter)
                    new[id(old)] = nn.Parameter(tensor, requires_grad=old.requires_grad) if is_parameter else tensor
                tensors[name] = new[id(old)]
