"""Linear layers that compute the gradient of their weight in a random subspace of their input (CompAct).

See arXiv 2410.15352, section 3. A layer with weight W [m, n] saves z = x P [tokens, r] instead of its input x [tokens,
n]. P [n, r] is recomputed from a seed whenever a layer needs P. The output and the gradient of x equal `nn.Linear`'s,
bit for bit. The gradient of W is never computed. Instead, the parameter `core` [m, r] gets the gradient (dy^T x) P, as
if the weight were W + core P^T with core = 0. Gradient accumulation, clipping and DDP work on the gradient of `core`.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from adacc_hf.torch_glue.private import version_of

CORE = "core"  # the parameter of a compact layer that gets the gradient in place of the weight


@torch.library.custom_op("adacc_hf::projection", mutates_args=())
def projection(seed: Tensor, inputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the random projection P [inputs, rank] of a group of compact layers.

    `seed` contains two integers on the CPU: the seed of the group, and the number of the subspace (period). P has
    Gaussian entries of variance 1 / rank, so that E[P P^T] is the identity. This function is a custom operator, so that
    compiled and replayed code draws the same P again. torch's default generators are not used.
    """
    generator = torch.Generator(device).manual_seed(derive_seed(*seed.tolist()))
    matrix = torch.randn(inputs, rank, generator=generator, device=device)
    return matrix.mul_(rank**-0.5).to(dtype)


@projection.register_fake
def _(seed: Tensor, inputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(inputs, rank, dtype=dtype, device=device)


def derive_seed(*parts: object) -> int:
    """Return the seed of a random projection, computed as a hash of `parts`. The seed's lower 32 bits, which the CPU's
    generator uses, depend on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class InputGroup:
    """Group of compact layers in one module with the same number of inputs, such as q, k and v. The layers share the
    random projection P. Layers that read the same input x also share the projected input z = x P."""

    def __init__(self, seed: int) -> None:
        self.seed = torch.tensor([seed, 0])
        """(seed of the group, number of the current subspace), int64 on the CPU. The seed is a tensor, because replayed
        code must read its present value."""
        self._period = 0
        self._last_projection: _CachedProjection | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last_projection": None}

    @property
    def period(self) -> int:
        """Number of the current subspace. Increases by one each time another subspace is drawn."""
        return self._period

    @period.setter
    def period(self, period: int) -> None:
        self._period = self.seed[1] = period

    def projection(self, inputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the random projection P [inputs, rank] onto the current subspace."""
        return projection(self.seed, inputs, rank, dtype, device)

    def project(self, x: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        """Return the projected input z = x P [tokens, rank], computed in `dtype`. All layers of the group that read the
        same `x` get the same tensor."""
        if torch.compiler.is_compiling():  # the compiler merges equal computations
            return self._compute(x, rank, dtype)
        key, last = (version_of(x), self.period, rank, dtype), self._last_projection
        if last is not None and last.key == key and last.x() is x:
            return last.z
        z = self._compute(x, rank, dtype)
        self._last_projection = _CachedProjection(key, weakref.ref(x, self._forget), z)
        return z

    def _forget(self, x: weakref.ref[Tensor]) -> None:
        """Drop the cached projection of `x` when `x` is freed. Afterwards, only autograd keeps the projection alive."""
        if self._last_projection is not None and self._last_projection.x is x:
            self._last_projection = None

    def _compute(self, x: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        return rows @ self.projection(x.shape[-1], rank, dtype, x.device)


class _CachedProjection(NamedTuple):
    """Cache entry of a group of compact layers: an input x of these layers, and the projection z of x."""

    key: tuple[Any, ...]
    x: weakref.ref[Tensor]
    z: Tensor


class _CompactProduct(torch.autograd.Function):
    """Product y = x W^T + b of a compact layer, which saves W and the projection z of x for backward, instead of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, core: Tensor, z: Tensor, is_conv: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, z)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype, core.dtype
        if is_conv:
            assert bias is not None, "a Conv1D layer has no bias"
            return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, z = ctx.saved_tensors
        x_dtype, bias_dtype, core_dtype = ctx.dtypes
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dbias = dcore = None
        if ctx.needs_input_grad[0]:
            # As under autocast, compute the product in the dtype of the output, and cast it to the dtype of the input.
            dx = (rows @ weight.to(dy.dtype)).view(*dy.shape[:-1], -1).to(x_dtype)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0).to(bias_dtype)
        if ctx.needs_input_grad[3]:
            dcore = (rows.t() @ z).to(core_dtype)
        return dx, None, dbias, dcore, None, None


class CompactLayer(nn.Module):
    """Mix-in for linear layers that saves a projection of the input, and computes a gradient for `core` only.

    `core` [outputs, rank] is an additional parameter, which is zero whenever a forward runs. The gradient of `core` is
    the weight's gradient in the subspace of the projection. The optimizer updates `core`, and `apply_core` adds the
    update to the weight. `core` is not in the state_dict. `core` takes memory only before the first step, because DDP
    broadcasts parameters, and during optimizer steps. At all other times `core` is an expanded zero, which takes no
    memory.
    """

    weight: Tensor
    bias: Any
    core: nn.Parameter
    group: InputGroup

    @property
    def matrix(self) -> Tensor:
        """The weight as a matrix [outputs, inputs]."""
        return self.weight

    @property
    def rank(self) -> int:
        """Dimension of the subspace in which the weight is trained."""
        return self.core.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.core.requires_grad):
            return super().forward(x)
        with torch.no_grad():
            z = self.group.project(x, self.rank, _compute_dtype(x))
        return _CompactProduct.apply(x, self.matrix, self.bias, self.core, z, isinstance(self, Conv1D))

    @torch.no_grad()
    def allocate_core(self) -> None:
        """Allocate memory for `core`, so that an optimizer step can write to it."""
        self.core.data = torch.zeros_like(self.core, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def apply_core(self, scale: float) -> None:
        """Add `scale` * core P^T to the weight after an optimizer step, and set `core` to zero."""
        matrix, core = _local_part(self.matrix), _local_part(self.core)
        p = self.group.projection(matrix.shape[1], self.rank, core.dtype, core.device)
        matrix.addmm_(core, p.t(), alpha=scale)
        self.clear_core()

    @torch.no_grad()
    def clear_core(self) -> None:
        """Set `core` to an expanded zero, which frees its memory. A shard of FSDP keeps its memory."""
        if _local_part(self.core) is self.core:
            self.core.data = self.core.new_zeros(()).expand(self.core.shape)
        else:
            self.core.zero_()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + CORE, None)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({**state, prefix + CORE: self.core.detach()}, prefix, *args)


class CompactLinear(CompactLayer, nn.Linear):
    """`nn.Linear` that trains in a random subspace of its inputs (see `CompactLayer`)."""


class CompactConv1D(CompactLayer, Conv1D):
    """`Conv1D`, GPT-2's linear layer with a weight [inputs, outputs], that trains in a random subspace."""

    @property
    def matrix(self) -> Tensor:
        return self.weight.t()


Plain = nn.Linear | Conv1D
CLASSES: dict[type[nn.Module], type[CompactLayer]] = {nn.Linear: CompactLinear, Conv1D: CompactConv1D}
"""Compact class for each supported class of linear layers. Subclasses of the supported classes are not supported."""


def make_compact(layer: Plain, rank: int, group: InputGroup) -> CompactLayer:
    """Convert `layer` to a compact layer in place, and return the layer. The layer trains in subspaces of dimension
    `rank`, with the projection of `group`. The weight no longer gets a gradient."""
    layer.weight.requires_grad_(False)
    layer.__class__ = CLASSES[type(layer)]  # type: ignore[assignment]
    compact = cast(CompactLayer, layer)
    compact.core = nn.Parameter(compact.weight.new_zeros(compact.matrix.shape[0], rank))
    compact.group = group
    return compact


def make_plain(layer: CompactLayer) -> None:
    """Convert a compact layer back to the plain layer, in place."""
    del layer.core, layer.group
    layer.__class__ = next(plain for plain, compact in CLASSES.items() if type(layer) is compact)  # type: ignore[assignment]
    layer.weight.requires_grad_(True)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a compact layer's matrix product with `x`: autocast's dtype if enabled, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
