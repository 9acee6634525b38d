"""Linear layers whose backward makes the gradient of their weight in a random subspace of their input.

After CompAct (arXiv 2410.15352, section 3). A layer of weight W [m, n] saves z = x P [tokens, r] in place of its input
x [tokens, n], with P [n, r] drawn anew whenever it is needed. Output and the gradient of x are those of `nn.Linear`,
bit for bit. The gradient of W is never made: what autograd sees is `core` [m, r], which is zero and enters as
W + core P^T would, so that its gradient is (dy^T x) P. What works on gradients (accumulation, clipping, DDP) works on
that.
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

PROJECTIONS = ("gaussian", "orthonormal")
CORE = "core"
"""The name of the parameter that a layer gets."""


@torch.library.custom_op("adacc_hf::projection", mutates_args=())
def projection(
    seed: Tensor, inputs: int, rank: int, orthonormal: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The projection P [inputs, rank] of `seed`: two integers on the CPU, that of the layers and the period.

    E[P P^T] is the identity: Gaussian entries of variance 1 / rank, or orthonormal columns times
    sqrt(inputs / rank). An operator of its own, so that what is compiled or replayed draws it again; no generator of
    torch's is touched.
    """
    generator = torch.Generator(device).manual_seed(mixed(*seed.tolist()))
    drawn = torch.randn(inputs, rank, generator=generator, device=device)
    if orthonormal:
        basis, triangle = torch.linalg.qr(drawn)
        # Only with these signs are all bases as likely.
        drawn = basis * triangle.diagonal().sign() * (inputs / rank) ** 0.5
    else:
        drawn *= rank**-0.5
    return drawn.to(dtype)


@projection.register_fake
def _(seed: Tensor, inputs: int, rank: int, orthonormal: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(inputs, rank, dtype=dtype, device=device)


def mixed(*parts: object) -> int:
    """A seed of `parts`, all of whose bits depend on all of them: the CPU's generator reads the lower 32 alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class InputGroup:
    """The layers that may read one input, those of a module with inputs as wide: they share P, and z if they do."""

    def __init__(self, seed: int, orthonormal: bool) -> None:
        self.seed = torch.tensor([seed, 0])
        """Their own seed and the period, int64, on the CPU: a tensor, so that what is replayed reads today's."""
        self.orthonormal = orthonormal
        self._period = 0
        self._projected: _Projected | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_projected": None}

    @property
    def period(self) -> int:
        """How often the subspace was drawn anew."""
        return self._period

    @period.setter
    def period(self, period: int) -> None:
        self._period = self.seed[1] = period

    def projection(self, inputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """P [inputs, rank] of this period."""
        return projection(self.seed, inputs, rank, self.orthonormal, dtype, device)

    def project(self, x: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        """z [tokens, rank] of the input `x`, computed in `dtype`; the same tensor for all layers that read `x`."""
        if torch.compiler.is_compiling():  # what is computed twice is merged there
            return self._made(x, rank, dtype)
        key = (version_of(x), self.period, rank, dtype)
        if self._projected is not None and self._projected.key == key and self._projected.x() is x:
            return self._projected.z
        z = self._made(x, rank, dtype)
        self._projected = _Projected(key, weakref.ref(x, self._forget), z)
        return z

    def _forget(self, x: weakref.ref[Tensor]) -> None:
        """No layer will read `x` any more: from now on z is backward's alone."""
        if self._projected is not None and self._projected.x is x:
            self._projected = None

    def _made(self, x: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        return rows @ self.projection(x.shape[-1], rank, dtype, x.device)


class _Projected(NamedTuple):
    """The last input of a group, and what came of it."""

    key: tuple[Any, ...]
    x: weakref.ref[Tensor]
    z: Tensor


class _CompactProduct(torch.autograd.Function):
    """y = x W^T + b, of which backward reads W and z."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, core: Tensor, z: Tensor, is_conv: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, z)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype, core.dtype
        if is_conv:
            assert bias is not None, "GPT-2's has one"
            return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, z = ctx.saved_tensors
        x_dtype, bias_dtype, core_dtype = ctx.dtypes
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dbias = dcore = None
        if ctx.needs_input_grad[0]:
            # As autocast leaves it: the product in the dtype of the output, and then the dtype of the input.
            dx = (rows @ weight.to(dy.dtype)).view(*dy.shape[:-1], -1).to(x_dtype)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0).to(bias_dtype)
        if ctx.needs_input_grad[3]:
            dcore = (rows.t() @ z).to(core_dtype)
        return dx, None, dbias, dcore, None, None


class CompactLayer(nn.Module):
    """What a layer gets whose class this comes in front of.

    `core` is a parameter, but no part of its state_dict. It has memory before the first step, for DDP to send around,
    and within steps; between them it is one zero.
    """

    weight: Tensor
    bias: Any
    core: nn.Parameter
    group: InputGroup

    @property
    def matrix(self) -> Tensor:
        """The weight as [outputs, inputs]."""
        return self.weight

    @property
    def rank(self) -> int:
        return self.core.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.core.requires_grad):
            return super().forward(x)
        with torch.no_grad():
            z = self.group.project(x, self.rank, _compute_dtype(x))
        return _CompactProduct.apply(x, self.matrix, self.bias, self.core, z, isinstance(self, Conv1D))

    @torch.no_grad()
    def hold(self) -> None:
        """Give `core` memory, for a step to write into."""
        self.core.data = torch.zeros_like(self.core, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def take(self, scale: float) -> None:
        """Add what the optimizer made of `core` to the weight, scale * core P^T, and let go of it."""
        matrix, core = _local(self.matrix), _local(self.core)
        drawn = self.group.projection(matrix.shape[1], self.rank, core.dtype, core.device)
        matrix.addmm_(core, drawn.t(), alpha=scale)
        self.let_go()

    @torch.no_grad()
    def let_go(self) -> None:
        """Make `core` zero again: one number that stands for all. As a shard of FSDP's it keeps its memory."""
        if _local(self.core) is self.core:
            self.core.data = self.core.new_zeros(()).expand(self.core.shape)
        else:
            self.core.zero_()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + CORE, None)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({**state, prefix + CORE: self.core.detach()}, prefix, *args)


class CompactLinear(CompactLayer, nn.Linear):
    """A linear layer."""


class CompactConv1D(CompactLayer, Conv1D):
    """GPT-2's linear layer, whose weight is [inputs, outputs]."""

    @property
    def matrix(self) -> Tensor:
        return self.weight.t()


Plain = nn.Linear | Conv1D
CLASSES: dict[type[nn.Module], type[CompactLayer]] = {nn.Linear: CompactLinear, Conv1D: CompactConv1D}
"""What may be made compact: these classes, and none that somebody derived from them."""


def make_compact(layer: Plain, rank: int, group: InputGroup) -> CompactLayer:
    """`layer`, which from now on trains in subspaces of `rank`; its weight gets no gradient any more."""
    layer.weight.requires_grad_(False)
    layer.__class__ = CLASSES[type(layer)]  # type: ignore[assignment]
    compact = cast(CompactLayer, layer)
    compact.core = nn.Parameter(compact.weight.new_zeros(compact.matrix.shape[0], rank))
    compact.group = group
    return compact


def make_plain(layer: CompactLayer) -> None:
    """Put a compact layer back as it was."""
    del layer.core, layer.group
    layer.__class__ = next(plain for plain, compact in CLASSES.items() if type(layer) is compact)  # type: ignore[assignment]
    layer.weight.requires_grad_(True)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What a product is computed in: autocast's dtype where it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
