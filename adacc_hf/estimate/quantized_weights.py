"""Linear layers with 4-bit weights for fake models, with the same memory and operators as in bitsandbytes.

No kernels of bitsandbytes are needed.

The rules are taken from bitsandbytes 0.50 (`nn/modules.py`, `autograd/_functions.py`, `functional.py`), Transformers'
`integrations/bitsandbytes.py` and PEFT's `tuners/lora/bnb.py`. In forward, bitsandbytes dequantizes the weight if the
matrix product has more than 1536 rows (`_gemm_4bit_use_custom_cuda`), and uses a fused kernel for fewer rows. In this
module the weight is always dequantized. Values are not computed, and a dequantized weight is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

BLOCK = 64
"""Number of weights that share a scale: bitsandbytes' default `blocksize` of 4-bit weights on NVIDIA's devices."""
NESTED_BLOCK = 256
"""Number of scales that share a scale of their own, if `bnb_4bit_use_double_quant` is set."""
_NUM_CODES = 16
_NUM_NESTED_CODES = 256


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Settings of a model with 4-bit weights."""

    has_nested_scales: bool = False
    """True if `bnb_4bit_use_double_quant` is set. A scale then takes 8 bits, and NESTED_BLOCK scales share a scale of
    their own."""
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
    """Linear layer of a fake model (without data) with a frozen 4-bit weight, two elements in each byte."""

    scales: Tensor
    nested_scales: Tensor

    def __init__(self, layer: nn.Linear | Conv1D, has_nested_scales: bool) -> None:
        nn.Module.__init__(self)
        inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
        self.in_features, self.out_features = inputs, outputs
        device, num_weights = layer.weight.device, layer.weight.numel()
        num_scales = -(-num_weights // BLOCK)
        codes = torch.zeros(-(-num_weights // 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        scale_dtype = torch.uint8 if has_nested_scales else torch.float32
        self.register_buffer("scales", torch.zeros(num_scales, dtype=scale_dtype, device=device))
        self.register_buffer("code", torch.zeros(_NUM_CODES, device=device))
        self.has_nested_scales = has_nested_scales
        if has_nested_scales:
            self.register_buffer("nested_scales", torch.zeros(-(-num_scales // NESTED_BLOCK), device=device))
            self.register_buffer("nested_code", torch.zeros(_NUM_NESTED_CODES, device=device))
            self.register_buffer("offset", torch.zeros((), device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = _QuantizedProduct.apply(hidden, self)
        return product.to(hidden.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return a tensor of `dtype` with the shape of the dequantized weight.

        If scales are quantized too, they are first dequantized to float32.
        """
        scales = self.scales
        if self.has_nested_scales:
            scales = dequantize(scales, self.nested_scales, [scales.numel()], torch.float32)
        return dequantize(self.weight, scales, [self.out_features, self.in_features], dtype)


@torch.library.custom_op("adacc_hf::dequantize", mutates_args=())
def dequantize(codes: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return zeros of `shape` and `dtype`, which take as much memory as the weight dequantized from `codes`."""
    return torch.zeros(shape, dtype=dtype, device=codes.device)


@dequantize.register_fake
def _(codes: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=codes.device)


class _QuantizedProduct(torch.autograd.Function):
    """Matrix product with a 4-bit weight. Forward and backward each dequantize the weight, and free it after use."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(hidden.dtype)
        return linear(hidden, layer.dequantized(hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.matmul(ctx.layer.dequantized(gradient.dtype)), None


def follow_bitsandbytes(adapted: nn.Module) -> None:
    """Replace the forward of LoRA layers around 4-bit weights by the forward that PEFT uses for bitsandbytes."""
    from peft.tuners.lora import Linear

    class LoraOfQuantized(Linear):
        """LoRA adapters of a layer with 4-bit weights. Without autocast, the input is cast to the adapters' dtype."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = self.base_layer(x).clone()
            for name in self.active_adapters:
                down: Any = self.lora_A[name]
                converts = not torch.is_autocast_enabled()
                inputs = x.to(down.weight.dtype) if converts else x
                update = self.lora_B[name](down(self.lora_dropout[name](inputs))) * self.scaling[name]
                result = result + (update.to(result.dtype) if converts else update)
            return result

    for module in adapted.modules():
        if type(module) is Linear and isinstance(module.get_base_layer(), QuantizedLinear):
            module.__class__ = LoraOfQuantized
