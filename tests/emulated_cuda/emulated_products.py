"""Products of CUDA that a CPU has not: those of halves that are added to a float32 sum while they are made."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Make torch call these for tensors on CUDA."""
    _library.impl("addmm.dtype_out", _addmm, "CUDA")


def _addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """On the memory of `out`, with nothing on the device besides; what is cast on the way is the host's."""
    own, left, right, total = (torch.ops.emulated_cuda.lent_to_cpu(tensor) for tensor in (self, mat1, mat2, out))
    total.copy_(torch.addmm(own.to(out_dtype), left.to(out_dtype), right.to(out_dtype), beta=beta, alpha=alpha))
    return out
