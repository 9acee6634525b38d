"""Arithmetic that differs between CUDA and a CPU: addmm with a wider output, and dropout, which multiplies in float32
by a float32 reciprocal.
"""

import warnings

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Register these implementations for tensors on CUDA."""
    _library.impl("addmm.dtype_out", _addmm, "CUDA")
    with warnings.catch_warnings():  # torch warns that this replaces an implementation, which would have the CPU's bits
        warnings.simplefilter("ignore")
        _library.impl("native_dropout", _dropout, "CUDA")
    _library.impl("native_dropout_backward", _dropout_backward, "CUDA")


def _as_cpu(tensor: Tensor) -> Tensor:
    return torch.ops.emulated_cuda.lent_to_cpu(tensor)


def _addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """Write the sum into `out`. Casts are temporaries in host memory, and do not count as device memory."""
    summand, left, right, total = map(_as_cpu, (self, mat1, mat2, out))
    total.copy_(torch.addmm(summand.to(out_dtype), left.to(out_dtype), right.to(out_dtype), beta=beta, alpha=alpha))
    return out


def _dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(values, dtype=torch.bool)
    if train is False or p == 0.0:
        return values.clone(), mask.fill_(True)
    mask.bernoulli_(1.0 - p)
    result = torch.empty_like(values)
    keep_probability = torch.tensor(1.0 - p, dtype=_compute_dtype(values))
    dtype = keep_probability.dtype
    scale = torch.ones((), dtype=dtype) / keep_probability if p < 1.0 else torch.zeros((), dtype=dtype)
    _multiply(result, values, mask, scale)
    return result, mask


def _dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    result = torch.empty_like(grad_output)
    _multiply(result, grad_output, mask, torch.tensor(scale, dtype=_compute_dtype(grad_output)))
    return result


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _multiply(result: Tensor, values: Tensor, mask: Tensor, scale: Tensor) -> None:
    wide = _as_cpu(values).to(scale.dtype)
    _as_cpu(result).copy_(wide * _as_cpu(mask) * scale)
