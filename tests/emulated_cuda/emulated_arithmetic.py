"""Arithmetic that CUDA does otherwise than a CPU: products that are added to a wider sum while they are made, and
dropout, which multiplies in float32 by a reciprocal of that precision.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Make torch call these for tensors on CUDA."""
    _library.impl("addmm.dtype_out", _addmm, "CUDA")
    with warnings.catch_warnings():  # torch notes that there was another one, which would have the CPU's bits
        warnings.simplefilter("ignore")
        _library.impl("native_dropout", _dropout, "CUDA")
    _library.impl("native_dropout_backward", _dropout_backward, "CUDA")


def _lent(tensor: Tensor) -> Tensor:
    return torch.ops.emulated_cuda.lent_to_cpu(tensor)


def _addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """On the memory of `out`, with nothing on the device besides; what is cast on the way is the host's."""
    own, left, right, total = map(_lent, (self, mat1, mat2, out))
    total.copy_(torch.addmm(own.to(out_dtype), left.to(out_dtype), right.to(out_dtype), beta=beta, alpha=alpha))
    return out


def _dropout(given: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(given, dtype=torch.bool)
    if train is False or p == 0.0:
        return given.clone(), mask.fill_(True)
    mask.bernoulli_(1.0 - p)
    result = torch.empty_like(given)
    kept = torch.tensor(1.0 - p, dtype=_computed_in(given))
    scale = torch.ones((), dtype=kept.dtype) / kept if p < 1.0 else torch.zeros((), dtype=kept.dtype)
    _multiply(result, given, mask, scale)
    return result, mask


def _dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    result = torch.empty_like(grad_output)
    _multiply(result, grad_output, mask, torch.tensor(scale, dtype=_computed_in(grad_output)))
    return result


def _computed_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _multiply(result: Tensor, given: Tensor, mask: Tensor, scale: Tensor) -> None:
    wide = _lent(given).to(scale.dtype)
    _lent(result).copy_(wide * _lent(mask) * scale)
