"""Models with LoRA adapters on fake tensors (tensors without memory), for predictions of memory and time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.estimate.model_presets import fresh_model, is_classifier
from adacc_hf.estimate.quantized_weights import Quantization, follow_bitsandbytes, quantize_linear_layers
from adacc_hf.torch_glue.private import buffers_of, parameters_of, unset_fake_temporarily


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Settings of LoRA adapters. For a setting that is None, PEFT's default is used."""

    rank: int | None = None
    targets: tuple[str, ...] | None = None
    """Names of the layers that get adapters. PEFT's default depends on the architecture."""
    dropout: float | None = None
    modules_to_save: tuple[str, ...] | None = None
    """Names of modules whose own weights are trained, in addition to the adapters."""
    dtype: str | None = None
    """Dtype of the adapters. PEFT's default is float32, even if the model's weights are 16-bit."""


def lora_model(
    config: PretrainedConfig, attention: str | None, dtype: str, adapters: Adapters, quantization: Quantization | None
) -> PreTrainedModel:
    """Return the model of `config` with LoRA adapters from PEFT, on fake tensors.

    Weights are stored in `dtype`. If `quantization` is given, linear layers have 4-bit weights instead. Raises
    AdaccError if PEFT is not installed, and ValueError if PEFT cannot add adapters to `adapters.targets`.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise AdaccError("--peft=lora needs the package peft: pip install peft") from error
    task = "SEQ_CLS" if is_classifier(config) else "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
    options: dict[str, Any] = {"r": adapters.rank, "target_modules": adapters.targets, "lora_dropout": adapters.dropout}
    options["modules_to_save"] = adapters.modules_to_save
    # Build on meta first: PEFT moves new adapters to their layer's device, which fake tensors do not support.
    with unset_fake_temporarily(), torch.device("meta"):
        model = fresh_model(config, attention, dtype)
        if quantization is not None:
            quantize_linear_layers(model, quantization)
        # If this setting is absent, PEFT sets it itself, and warns.
        is_transposed = any(isinstance(module, Conv1D) for module in model.modules())
        explicit_options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        lora = LoraConfig(task_type=task, fan_in_fan_out=is_transposed, **explicit_options)
        with warnings.catch_warnings():  # PEFT reads a property that Transformers renames: irrelevant to users
            warnings.simplefilter("ignore", FutureWarning)
            try:
                adapted = get_peft_model(model, lora, low_cpu_mem_usage=True)
            except ValueError as error:
                if adapters.targets is None:
                    raise
                raise ValueError(
                    f"--lora-targets={' '.join(adapters.targets)}: PEFT cannot add adapters to these layers: {error}"
                ) from error
        if adapters.dtype is not None:
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(getattr(torch, adapters.dtype))
        if quantization is not None:
            follow_bitsandbytes(adapted)
    _materialize_fake_model(adapted)
    return cast("PreTrainedModel", adapted)  # PeftModel forwards missing attributes to the model


def _materialize_fake_model(model: nn.Module) -> None:
    """Replace a model's parameters and buffers, which are on meta, by new tensors on the default device. Tensors that
    several modules share stay shared."""
    replacements: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in replacements:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, nn.Parameter)
                    replacements[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
                tensors[name] = replacements[id(old)]
