"""Models with LoRA adapters on fake tensors (tensors without memory), also around 4-bit weights.

No kernels of bitsandbytes are needed. The rules for 4-bit weights are taken from bitsandbytes 0.50 (`nn/modules.py`,
`autograd/_functions.py`), Transformers' `integrations/bitsandbytes.py` and PEFT's `tuners/lora/bnb.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.estimate.presets import fresh_model, is_classifier
from adacc_hf.torch_glue.private import buffers_of, parameters_of, private_name, unset_fake_temporarily

_CAST_INPUT = private_name("BaseTunerLayer", "_cast_input_dtype")
_SCALE_BLOCK = 64
"""Number of weights that share a scale: bitsandbytes' default `blocksize` of 4-bit weights on NVIDIA's devices."""
_NESTED_BLOCK = 256
"""Number of scales that share a scale of their own."""


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
        module: Any
        for module in adapted.modules():
            if isinstance(getattr(module, "base_layer", None), QuantizedLinear):
                setattr(module, _CAST_INPUT, _cast_without_autocast)
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


# Weights of 4 bits.


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Settings of a model with 4-bit weights."""

    has_nested_scales: bool = False
    """True if `bnb_4bit_use_double_quant` is set. A scale then takes 8 bits, and 256 scales share one of their own."""
    skipped_modules: tuple[str, ...] = ()
    """Names of modules whose weights are not quantized, in addition to the output embedding."""


def quantization_of(config: PretrainedConfig, model: str) -> Quantization | None:
    """Return the 4-bit quantization in the model's `config`, or None if the weights are not quantized.

    Raises ValueError for other formats. The error names `model`.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    if not settings.get("load_in_4bit"):
        method = "8-bit weights of bitsandbytes" if settings.get("load_in_8bit") else settings.get("quant_method")
        raise ValueError(
            f"--model={model} has a quantization_config ({method}) that cannot be planned: only bitsandbytes' 4 bits "
            f"can. Remove it from the config to plan unquantized weights"
        )
    # The name of the setting begins with "llm_int8", although the setting applies to 4-bit weights too.
    skipped = next((value for name, value in settings.items() if name.endswith("_skip_modules")), None)
    return Quantization(
        has_nested_scales=bool(settings.get("bnb_4bit_use_double_quant")), skipped_modules=tuple(skipped or ())
    )


def quantize_linear_layers(model: PreTrainedModel, quantization: Quantization) -> None:
    """Replace the linear layers of `model` by layers with 4-bit weights, except the head and the skipped modules."""
    last_name = [name for name, _ in model.named_modules()][-1]
    for name, module in list(model.named_modules()):
        is_skipped = module is model.get_output_embeddings() or name == last_name
        is_skipped |= any(name == skipped or f".{skipped}." in f".{name}." for skipped in quantization.skipped_modules)
        if type(module) in (nn.Linear, Conv1D) and not is_skipped:
            model.set_submodule(name, QuantizedLinear(module, quantization.has_nested_scales))


class QuantizedLinear(nn.Linear):
    """Linear layer of a fake model, whose frozen weight has the bytes of bitsandbytes' 4-bit weights with their scales.

    A product dequantizes the weight, in forward and again in backward. bitsandbytes does so for products of more than
    1536 rows, and has a fused kernel for fewer rows.
    """

    def __init__(self, layer: nn.Linear | Conv1D, has_nested_scales: bool) -> None:
        nn.Module.__init__(self)
        inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
        self.in_features, self.out_features = inputs, outputs
        num_weights = layer.weight.numel()
        num_scales = -(-num_weights // _SCALE_BLOCK)
        scale_bytes = 4 * num_scales
        if has_nested_scales:  # 8 bits each, float32 scales of the scales, a table of 256 codes and an offset
            scale_bytes = num_scales + 4 * (-(-num_scales // _NESTED_BLOCK) + 256 + 1)
        table_bytes = 4 * 16
        nbytes = -(-num_weights // 2) + scale_bytes + table_bytes
        self.weight = nn.Parameter(layer.weight.new_zeros((nbytes, 1), dtype=torch.uint8), requires_grad=False)
        self.bias = layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = _QuantizedProduct.apply(hidden, self)
        return product.to(hidden.dtype).clone()  # PEFT adds the adapters' result to a copy

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return zeros with the shape of the weight in `dtype`."""
        return self.weight.new_zeros((self.out_features, self.in_features), dtype=dtype)


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(hidden.dtype)
        return linear(hidden, layer.dequantized(hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.matmul(ctx.layer.dequantized(gradient.dtype)), None


def _cast_without_autocast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the inputs of adapters around 4-bit weights as PEFT does for bitsandbytes: only without autocast."""
    return inputs if torch.is_autocast_enabled() else inputs.to(dtype)
