"""Logits that are made only if somebody reads them: the loss can do without, everything else gets the real ones.

A `LazyLogits` knows the rows and the weight it would be made from. Casts, reshapes and slices that leave the
vocabulary whole stay lazy; `F.cross_entropy` of one is computed chunk by chunk; any other use makes the real logits,
once, and goes on with them as plain training does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.chunked_loss import chunked_cross_entropy
from adacc_hf.torch_glue.private import DisableTorchFunctionSubclass, keeps_graph, make_wrapper_subclass, tree_map


class Watcher(Protocol):
    """Whoever wants to know what becomes of lazy logits."""

    def note_loss(self, loss: LossCall) -> None:
        """A loss was computed chunk by chunk."""

    def note_whole(self) -> None:
        """The logits were made."""


@dataclass(frozen=True)
class HeadCall:
    """One call of the output layer."""

    rows: Tensor
    """[..., D]: what the layer was called with."""
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """The type that the layer's product is made in."""
    watcher: Watcher

    def whole(self) -> Tensor:
        """The logits, with their graph, as the layer itself makes them."""
        self.watcher.note_whole()
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.autocast(self.rows.device.type, enabled=False):
            return F.linear(self.rows.to(self.dtype), self.weight.to(self.dtype), bias)

    def on_sources(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The logits of other tensors."""
        return replace(self, rows=rows, weight=weight, bias=bias).whole()


@dataclass(frozen=True)
class LossCall:
    """A loss of lazy logits."""

    call: HeadCall
    rows: Tensor
    """[N, D]: a view of the layer's rows."""
    target: Tensor
    ignore_index: int
    reduction: str

    def on(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> LossCall:
        """The same loss of other tensors."""
        return replace(self, rows=rows, call=replace(self.call, weight=weight, bias=bias))

    def chunked(self) -> Tensor:
        """The loss, chunk by chunk."""
        return chunked_cross_entropy(
            self.rows,
            self.call.weight,
            self.call.bias,
            self.target,
            dtype=self.call.dtype,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )


def product_dtype(weight: Tensor) -> torch.dtype:
    """The type that a linear layer of that weight computes in here and now; autocast leaves float64 as it is."""
    device_type = weight.device.type
    if torch.is_autocast_enabled(device_type) and weight.dtype is not torch.float64:
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


class LazyLogits(Tensor):
    """Stands for `make()`, the logits of `rows` or a view or cast of them. It has no memory of its own.

    It is an output of the graph like any other, so that what reads it below Python (DDP, other autograd functions)
    finds its way back to the layer.
    """

    call: HeadCall
    rows: Tensor
    make: Callable[[], Tensor]
    made: Tensor | None
    is_handed_on: bool = False
    """Whether an autograd function returned it, which all gradients of it must pass: no loss can do without them."""

    @staticmethod
    def of(call: HeadCall) -> LazyLogits:
        shape = (*call.rows.shape[:-1], call.weight.shape[0])
        sources = (call.rows, call.weight) if call.bias is None else (call.rows, call.weight, call.bias)
        return LazyLogits._build(call, call.rows, call.whole, call.on_sources, shape, call.dtype, sources)

    @staticmethod
    def _build(
        call: HeadCall,
        rows: Tensor,
        make: Callable[[], Tensor],
        recompute: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sources: tuple[Tensor, ...],
    ) -> LazyLogits:
        lazy = _Stand.apply(recompute, shape, dtype, *sources)
        lazy.call, lazy.rows, lazy.make, lazy.made = call, rows, make, None
        return lazy

    def whole(self) -> Tensor:
        """The real tensor, made at the first call."""
        if self.made is None:
            with torch.enable_grad():
                self.made = _Values.apply(self.make(), self) if self.is_handed_on else self.make()
        return self.made

    def handed_on(self) -> LazyLogits:
        """The same logits for an autograd function to return."""
        lazy = make_wrapper_subclass(LazyLogits, self.shape, dtype=self.dtype, device=self.device)
        lazy.call, lazy.rows, lazy.make, lazy.made = self.call, self.rows, lambda: self.whole().detach(), None
        lazy.is_handed_on = True
        return lazy

    def derive(self, function: Callable[[Tensor], Tensor], rows: Tensor, dtype: torch.dtype) -> LazyLogits:
        """`function` of these logits, as lazy as they are, for a function that takes them row by row."""
        shape = (*rows.shape[:-1], self.shape[-1])
        return LazyLogits._build(self.call, rows, lambda: function(self.whole()), function, shape, dtype, (self,))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and first.made is None:
            if func is Tensor.register_hook and _is_of_deepspeed(*args[1:], **kwargs):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _UNSUPPORTED:
                raise ChunkedHeadError(
                    f"{func.__name__} on the logits of a chunked head: they have no gradient of their own, since the "
                    f'loss does without them; set AdaccConfig(head="plain")'
                )
            known = _LAZY if not first.is_handed_on else {Tensor.clone: _clone}
            result = known.get(func, _never)(first, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))

    @classmethod
    # torch declares what it has there by default, a function of no class.
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd's own, of an output of `_Stand`
            return args[0]
        return func(*tree_map(_real_values, args), **tree_map(_real_values, kwargs or {}))


class _Stand(torch.autograd.Function):
    """Makes the stand-in, and carries a gradient that reached it below Python to what the logits are made from."""

    @staticmethod
    def forward(ctx: Any, recompute: Callable[..., Tensor], shape: Any, dtype: Any, *sources: Tensor) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.recompute, ctx.sources = recompute, sources
        device = sources[0].device
        return make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device, requires_grad=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # DDP hands on outputs that nobody read
            _let_go(ctx)
            return (None,) * len(ctx.needs_input_grad)
        # The graph from the sources to the logits is made anew, of copies without history: rows may have come from the
        # weight itself, where it is the embedding's too, and autograd would follow it back through the whole model.
        sources = [_real(source).detach().requires_grad_(source.requires_grad) for source in ctx.sources]
        with torch.enable_grad():
            whole = ctx.recompute(*sources)
        wanted = [source for source in sources if source.requires_grad]
        found = iter(torch.autograd.grad(whole, wanted, gradient))
        _let_go(ctx)
        return (None, None, None, *(next(found) if source.requires_grad else None for source in sources))


def _let_go(ctx: Any) -> None:
    """Free what a stand-in is made from as autograd frees saved tensors, which lazy logits must not be: saved, they
    would be shown to hooks, and made."""
    if not keeps_graph():
        ctx.recompute, ctx.sources = None, ()


class _Values(torch.autograd.Function):
    """The values of logits, in the place that their stand-in has in the graph."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lazy: LazyLogits) -> Tensor:
        return values.clone()  # what is returned may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _real(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, LazyLogits) else leaf


def _real_values(leaf: Any) -> Any:
    return leaf.whole().detach() if isinstance(leaf, LazyLogits) else leaf


def _is_of_deepspeed(hook: Any) -> bool:
    """Whether a hook is the one that DeepSpeed puts on all that a model returns: the loss, at the latest, calls it."""
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")  # None for a list's append


def _never(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _cast(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """`lazy.to(...)` where only the type may change."""
    target = (
        args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if len(kwargs) == 1 and not args else None
    )
    if isinstance(target, Tensor) or target is None:
        return NotImplemented
    if not isinstance(target, torch.dtype):
        return lazy if torch.device(target) == lazy.device else NotImplemented
    if not target.is_floating_point:
        return NotImplemented
    return lazy if target == lazy.dtype else lazy.derive(lambda whole: whole.to(target), lazy.rows, target)


def _float(lazy: LazyLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _cast(lazy, torch.float32)


def _contiguous(lazy: LazyLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else lazy


def _clone(lazy: LazyLogits, **kwargs: Any) -> Any:
    """What DDP hands on, of each output that its autograd function is given, if it looks for unused parameters."""
    return NotImplemented if kwargs or torch.is_grad_enabled() else lazy.handed_on()


def _reshape(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """`view` and `reshape` that leave the last dimension as it is."""
    sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else args
    if kwargs or not all(isinstance(size, int) for size in sizes) or not sizes or sizes[-1] != lazy.shape[-1]:
        return NotImplemented
    rows = lazy.rows.reshape(*sizes[:-1], lazy.rows.shape[-1])
    return lazy.derive(lambda whole: whole.reshape(sizes), rows, lazy.dtype)


def _index(lazy: LazyLogits, index: Any) -> Any:
    """Slices of all dimensions but the last."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    reaches_last = Ellipsis in parts or len(parts) == lazy.dim()
    if reaches_last and parts[-1] not in (slice(None), Ellipsis):
        return NotImplemented
    return lazy.derive(lambda whole: whole[index], lazy.rows[index], lazy.dtype)


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Chunk by chunk for class numbers, without class weights and smoothing; in float32, also for bfloat16 logits."""
    is_usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    is_usual = is_usual and reduction in ("mean", "sum") and not isinstance(target, LazyLogits)
    if not is_usual or lazy.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return NotImplemented
    loss = LossCall(lazy.call, lazy.rows, target, ignore_index, reduction)
    lazy.call.watcher.note_loss(loss)
    return loss.chunked()


_LAZY: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.float: _float,
    Tensor.to: _cast,
    Tensor.contiguous: _contiguous,
    Tensor.clone: _clone,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    Tensor.__getitem__: _index,
}

_UNSUPPORTED = frozenset({Tensor.register_hook, Tensor.retain_grad})

_METADATA = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu",
            "is_meta", "is_sparse", "is_quantized", "is_nested",
        )
    }
    | {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
       Tensor.is_complex, Tensor.get_device, Tensor.__len__, Tensor.element_size}
)  # fmt: skip
"""What a tensor tells of itself without its values."""
