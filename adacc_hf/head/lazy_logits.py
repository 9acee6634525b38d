"""Lazy logits: a tensor subclass whose values are computed only if code other than the loss reads them.

`LazyLogits` refers to the output layer's input rows and weight, from which the logits are computed. Casts, reshapes and
slices that keep the vocabulary dimension stay lazy. `F.cross_entropy` is computed in chunks. Any other use computes the
full logits, once, and continues with them as plain training does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.chunked_loss import chunked_cross_entropy
from adacc_hf.torch_glue.private import (
    VIEWED,
    DisableTorchFunctionSubclass,
    keeps_graph,
    make_wrapper_subclass,
    tree_map,
)
from adacc_hf.torch_glue.tensors import is_plain

if TYPE_CHECKING:
    from adacc_hf.head.head import ChunkedHead


@dataclass(frozen=True)
class HeadCall:
    """Inputs of one call of the output layer, from which its logits can be computed later."""

    rows: Tensor
    """[..., D]: input of the layer."""
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """Dtype of the layer's matrix product."""
    head: ChunkedHead

    def check_weight(self) -> None:
        """Raise ChunkedHeadError if FSDP has freed the weight since the call."""
        if is_plain(self.weight) and self.weight.numel() and not self.weight.untyped_storage().nbytes():
            raise ChunkedHeadError(
                "FSDP has freed the output layer's weight before the logits are read, because the loss is computed "
                "after the model's forward: pass reshard_after_forward=False to fully_shard for the whole model (the "
                'blocks may keep True), or set AdaccConfig(head="plain")'
            )

    def full_logits(self) -> Tensor:
        """Compute the logits with their autograd graph, as the plain layer does, and count them."""
        self.check_weight()
        self.head.note_full_logits()
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.autocast(self.rows.device.type, enabled=False):
            return F.linear(self.rows.to(self.dtype), self.weight.to(self.dtype), bias)

    def full_logits_from(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the logits as `full_logits` does, but from these `rows`, `weight` and `bias`."""
        return replace(self, rows=rows, weight=weight, bias=bias).full_logits()


@dataclass(frozen=True)
class LossCall:
    """Inputs of a cross entropy of lazy logits."""

    call: HeadCall
    rows: Tensor
    """[N, D]: the rows of the output layer's input that the logits of this loss are computed from."""
    target: Tensor
    ignore_index: int
    reduction: str

    def on(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> LossCall:
        """Return a copy of this loss for other `rows`, `weight` and `bias`."""
        return replace(self, rows=rows, call=replace(self.call, weight=weight, bias=bias))

    def part(self, num_rows: int) -> LossCall:
        """Return the loss of the first `num_rows` rows."""
        return replace(self, rows=self.rows[:num_rows], target=self.target[:num_rows])

    def detached(self) -> LossCall:
        """Return a copy of this loss whose inputs are leaf tensors, so that its backward ends at them."""
        rows, weight, bias = (
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in (self.rows, self.call.weight, self.call.bias)
        )
        assert rows is not None
        assert weight is not None
        return self.on(rows, weight, bias)

    def chunked(self) -> Tensor:
        """Compute the loss in chunks."""
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
    """Return the dtype in which a linear layer with this weight computes: autocast's dtype, or the weight's own dtype.
    Autocast does not change float64."""
    device_type = weight.device.type
    if torch.is_autocast_enabled(device_type) and weight.dtype is not torch.float64:
        return torch.get_autocast_dtype(device_type)
    return weight.dtype


class LazyLogits(Tensor):
    """Tensor without memory that stands for the logits of `rows`, or for a view or cast of these logits. `compute()`
    returns the logits as an ordinary tensor. Lazy logits are an output of an autograd function, so C++ code that reads
    the autograd graph (DDP, other autograd functions) can follow the graph back to the layer."""

    call: HeadCall
    rows: Tensor
    compute: Callable[[], Tensor]
    parent: LazyLogits | None = None
    """The lazy logits of which these are a view or cast."""
    real_logits: Tensor | None
    """Logits as an ordinary tensor, or None before they are computed."""
    is_function_output: bool = False
    """True if another autograd function returned this tensor. A loss of this tensor cannot be chunked, because the
    gradient must pass through that function."""

    @staticmethod
    def of(call: HeadCall) -> LazyLogits:
        """Return the lazy logits of a call of the output layer."""
        shape = (*call.rows.shape[:-1], call.weight.shape[0])
        sources = (call.rows, call.weight) if call.bias is None else (call.rows, call.weight, call.bias)
        return LazyLogits._build(call, call.rows, call.full_logits, call.full_logits_from, shape, call.dtype, sources)

    @staticmethod
    def _build(
        call: HeadCall,
        rows: Tensor,
        compute: Callable[[], Tensor],
        recompute: Callable[..., Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sources: tuple[Tensor, ...],
    ) -> LazyLogits:
        """Create lazy logits. If C++ code runs backward through lazy logits, `recompute(*sources)` computes the logits
        for this backward."""
        lazy = _LazyPlaceholder.apply(recompute, shape, dtype, *sources)
        lazy.call, lazy.rows, lazy.compute, lazy.real_logits = call, rows, compute, None
        return lazy

    def materialize(self) -> Tensor:
        """Return the logits as an ordinary tensor. They are computed at the first call only."""
        if self.real_logits is None:
            with torch.enable_grad():
                self.real_logits = (
                    _ComputedLogits.apply(self.compute(), self) if self.is_function_output else self.compute()
                )
        return self.real_logits

    def as_function_output(self) -> LazyLogits:
        """Return a lazy copy of these logits, to be returned by another autograd function. The copy is needed, because
        an autograd function must not return its input."""
        lazy = make_wrapper_subclass(LazyLogits, self.shape, dtype=self.dtype, device=self.device)
        lazy.call, lazy.rows, lazy.real_logits = self.call, self.rows, None
        lazy.compute = lambda: self.materialize().detach()
        lazy.is_function_output = True
        return lazy

    def derive(self, function: Callable[[Tensor], Tensor], rows: Tensor, dtype: torch.dtype) -> LazyLogits:
        """Return the result of `function(logits)` as lazy logits. The function must keep the vocabulary dimension.
        `rows` are the rows of the layer's input that belong to the result."""
        shape = (*rows.shape[:-1], self.shape[-1])
        sources = (self,)
        derived = LazyLogits._build(
            self.call, rows, lambda: function(self.materialize()), function, shape, dtype, sources
        )
        derived.parent = self
        return derived

    def as_tensors(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the logits as an ordinary tensor, and those that they are derived from, which a model's code keeps
        meanwhile. Stay lazy: another use computes them again."""
        logits, origins = self.materialize(), []
        lazy: LazyLogits | None = self
        while lazy is not None:
            origins.append(lazy.real_logits)
            lazy.real_logits, lazy = None, lazy.parent
        return logits, origins

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and first.real_logits is None:
            if func is Tensor.register_hook and _is_hook_of_sharding(*args[1:], **kwargs):
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _UNSUPPORTED and not first.call.head.computes_plainly:
                raise ChunkedHeadError(
                    f"{func.__name__} was called on the logits of a chunked head, which have no gradient, because the "
                    f'loss is computed without the full logits; set AdaccConfig(head="plain")'
                )
            handler = _LAZY.get(func) if not first.is_function_output or func is Tensor.clone else None
            result = NotImplemented if handler is None else handler(first, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        return func(*tree_map(_materialize, args), **tree_map(_materialize, kwargs))

    @classmethod
    # torch declares `__torch_dispatch__` as a plain function.
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # called by autograd for an output of `_LazyPlaceholder`
            return args[0]
        return func(*tree_map(_materialize_detached, args), **tree_map(_materialize_detached, kwargs or {}))


class _LazyPlaceholder(torch.autograd.Function):
    """Autograd function that creates lazy logits. They get a gradient only if C++ code reads them, as DDP or another
    autograd function does."""

    @staticmethod
    def forward(ctx: Any, recompute: Callable[..., Tensor], shape: Any, dtype: Any, *sources: Tensor) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.recompute, ctx.sources = recompute, sources
        device = sources[0].device
        return make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device, requires_grad=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # DDP passes through outputs that the loss did not read
            _free_sources(ctx)
            return (None,) * len(ctx.needs_input_grad)
        # Rebuild the graph from detached sources to the logits. Otherwise autograd would follow the graph of the rows
        # through the whole model back to the weight, if the weight is also the embedding's.
        sources = [_materialize(source).detach().requires_grad_(source.requires_grad) for source in ctx.sources]
        with torch.enable_grad():
            logits = ctx.recompute(*sources)
        inputs = [source for source in sources if source.requires_grad]
        gradients = iter(torch.autograd.grad(logits, inputs, gradient))
        _free_sources(ctx)
        return (None, None, None, *(next(gradients) if source.requires_grad else None for source in sources))


def _free_sources(ctx: Any) -> None:
    """Free the sources of lazy logits when autograd frees saved tensors. They are not saved tensors themselves, because
    saved-tensor hooks would read a source that is lazy, and so compute the full logits."""
    if not keeps_graph():
        ctx.recompute, ctx.sources = None, ()


class _ComputedLogits(torch.autograd.Function):
    """Autograd function that returns computed logits, but passes their gradient back to the lazy logits."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lazy: LazyLogits) -> Tensor:
        return values.clone()  # a copy, because the result may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _materialize(leaf: Any) -> Any:
    """Return `leaf` unchanged or, if it is lazy logits, the logits as an ordinary tensor."""
    return leaf.materialize() if isinstance(leaf, LazyLogits) else leaf


def _materialize_detached(leaf: Any) -> Any:
    return leaf.materialize().detach() if isinstance(leaf, LazyLogits) else leaf


def _is_hook_of_sharding(hook: Any) -> bool:
    """Return True if `hook` is that of DeepSpeed or FSDP on a model's outputs, which prepares the parameters for
    backward. The hook is also registered on the loss, so the logits need not be computed for it."""
    function = hook.func if isinstance(hook, partial) else hook
    return (getattr(function, "__module__", None) or "").startswith(_SHARDING)  # a builtin method has None


def _cast(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Return `lazy.to(...)` if only the dtype changes, else NotImplemented."""
    target = (
        args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if len(kwargs) == 1 and not args else None
    )
    if isinstance(target, Tensor) or target is None:
        return NotImplemented
    if not isinstance(target, torch.dtype):
        return lazy if torch.device(target) == lazy.device else NotImplemented
    if not target.is_floating_point:
        return NotImplemented
    return lazy if target == lazy.dtype else lazy.derive(lambda logits: logits.to(target), lazy.rows, target)


def _clone(lazy: LazyLogits, **kwargs: Any) -> Any:
    """Return a clone that is lazy too."""
    return NotImplemented if kwargs or torch.is_grad_enabled() else lazy.as_function_output()


def _reshape(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Return the result of `view` or `reshape` as lazy logits if the last dimension keeps its size, else
    NotImplemented."""
    sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else args
    if kwargs or not all(isinstance(size, int) for size in sizes) or not sizes or sizes[-1] != lazy.shape[-1]:
        return NotImplemented
    rows = lazy.rows.reshape(*sizes[:-1], lazy.rows.shape[-1])
    return lazy.derive(lambda logits: logits.reshape(sizes), rows, lazy.dtype)


def _index(lazy: LazyLogits, index: Any) -> Any:
    """Return `lazy[index]` as lazy logits if `index` slices dimensions other than the last, else NotImplemented."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    reaches_last = Ellipsis in parts or len(parts) == lazy.dim()
    if reaches_last and parts[-1] not in (slice(None), Ellipsis):
        return NotImplemented
    return lazy.derive(lambda logits: logits[index], lazy.rows[index], lazy.dtype)


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
    """Compute `F.cross_entropy` of lazy logits in chunks. Return NotImplemented if the arguments are not supported.
    Targets must be class indices, and class weights and label smoothing are not supported. The loss is computed in
    float32, also for bfloat16 logits."""
    is_supported = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    is_supported = is_supported and reduction in ("mean", "sum") and not isinstance(target, LazyLogits)
    if not is_supported or lazy.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return NotImplemented
    lazy.call.check_weight()
    loss = LossCall(lazy.call, lazy.rows, target, ignore_index, reduction)
    lazy.call.head.note_loss(loss)
    if lazy.call.head.computes_plainly:
        logits, _origins = lazy.as_tensors()
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    return loss.chunked()


_LAZY: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.float: lambda lazy, **kwargs: NotImplemented if kwargs else _cast(lazy, torch.float32),
    Tensor.to: _cast,
    Tensor.contiguous: lambda lazy, **kwargs: NotImplemented if kwargs else lazy,
    Tensor.clone: _clone,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    Tensor.__getitem__: _index,
}

_SHARDING = ("deepspeed.", "torch.distributed.fsdp.")
"""Packages whose hooks on the outputs of a model gather its parameters before backward."""
_UNSUPPORTED = frozenset({Tensor.register_hook, Tensor.retain_grad})

_METADATA = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu",
            "is_meta", "is_sparse", "is_quantized", "is_nested", VIEWED,
        )
    }
    | {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
       Tensor.is_complex, Tensor.get_device, Tensor.__len__, Tensor.element_size}
)  # fmt: skip
"""Functions that return properties of a tensor without reading its elements."""
