"""Tensors that are more than they show (DTensor), and the autograd node that runs now.

Operators run on the parts, so a tape knows these alone. Autograd saves the whole: what it gets back must be one again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from adacc_hf.torch_glue.private import (
    GRADIENT_HOOKS,
    LOCAL_TENSOR,
    SPEC,
    coo_indices,
    coo_values,
    current_autograd_node,
    is_traceable_wrapper_subclass,
)

_INDICES = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_coo: (coo_indices,),
}
"""What tells where the elements of a sparse tensor are."""
PLAIN = frozenset({Tensor, nn.Parameter})
"""Classes of tensors that are nothing else. Where hundreds pass in a step, these are asked for without a call."""


def runs_on_parts(kind: type) -> bool:
    """Whether operators on tensors of that class are made of others (DTensor), or wait first (what is on its way)."""
    return hasattr(kind, LOCAL_TENSOR) or hasattr(kind, "trigger_wait")


def local_of(tensor: Tensor) -> Tensor:
    """The part that this rank has, once it has arrived; a plain tensor itself."""
    return tensor if is_plain(tensor) else arrived(getattr(tensor, LOCAL_TENSOR, tensor))


def arrived(tensor: Tensor) -> Tensor:
    """What has come, of a tensor that is on its way from other ranks; any other tensor itself."""
    return tensor if is_plain(tensor) or not hasattr(tensor, "trigger_wait") else tensor.trigger_wait()


def spec_of(tensor: Tensor) -> Any:
    """What makes a DTensor of this rank's part of it; None for a plain tensor."""
    return None if is_plain(tensor) else getattr(tensor, SPEC, None)


def whole(local: Tensor, spec: Any) -> Tensor:
    """The DTensor of which this rank has the part `local`; `local` itself without a `spec`."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)


def parts_with_memory(tensor: Tensor) -> list[Tensor]:
    """The plain tensors whose memory `tensor` takes on this rank: of a quantized weight (torchao) codes and scales."""
    local = local_of(tensor)
    if local.layout in _INDICES:
        return [_elements(local), *(indices(local) for indices in _INDICES[local.layout])]
    if not is_traceable_wrapper_subclass(local):
        return [local]
    names, _ = local.__tensor_flatten__()
    return [part for name in names for part in parts_with_memory(getattr(local, name))]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor's part on this rank; of a tensor that has none (sparse, nested) that of its elements."""
    local = local_of(tensor)
    return (local if local.layout is torch.strided else _elements(local)).untyped_storage()


def wraps_others(tensor: Tensor) -> bool:
    """Whether `tensor` has no memory of its own but other tensors that it is made of."""
    return not is_plain(tensor) and is_traceable_wrapper_subclass(tensor)


def copy_with_storage(base: torch.Tensor) -> torch.Tensor:
    """A tensor like `base` on a copy of its whole storage."""
    storage = base.untyped_storage().clone()
    copy = torch.empty(0, dtype=base.dtype, device=base.device)
    return copy.set_(storage, base.storage_offset(), base.shape, base.stride())


_CHUNK = 1 << 17
"""Words of a storage that are mixed at once."""
_ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Odd numbers of 64 bits, half of whose bits are set, as signed integers."""


def fingerprint(tensor: Tensor) -> int:
    """A hash of 64 bits of the whole storage of `tensor`: where every element lies counts.

    It takes no memory to speak of, where a copy would take as much as the storage.
    """
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    num_whole = content.numel() // 8 * 8
    words = content[:num_whole].view(torch.int64)
    places = torch.arange(min(_CHUNK, words.numel()), device=tensor.device) * _ODD[0]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK):
        mixed = (chunk ^ places[: chunk.numel()]).mul_(_ODD[1])
        mixed ^= mixed >> 31
        total = total * _ODD[2] + mixed.mul_(_ODD[2]).sum()
    return hash((total.item(), bytes(content[num_whole:].tolist())))


def copied(tensor: Tensor) -> Tensor:
    """`tensor` on a copy of its storage."""
    return whole(copy_with_storage(local_of(tensor)), spec_of(tensor))


def _elements(tensor: Tensor) -> Tensor:
    return coo_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is nothing but a tensor."""
    return type(tensor) in PLAIN


def is_fake(tensor: Tensor) -> bool:
    """Return True if the tensor has no data and only imitates one (FakeTensor)."""
    return hasattr(tensor, "fake_mode")


# Which node of autograd's graph runs now.
#
# torch's engine knows that of its own backward only. A backward that calls the nodes itself, as that over tensors
# without memory does, says so here.

_called: ContextVar[Any] = ContextVar("adacc_hf_called_node", default=None)


def current_node() -> Any:
    """The node whose backward runs in this thread, or None outside of any backward."""
    node = current_autograd_node()
    return _called.get() if node is None else node


@contextmanager
def calling(node: Any) -> Iterator[None]:
    """While open, `node` is called by hand: unless torch's engine runs one inside, it is the current one."""
    token = _called.set(node)
    try:
        yield
    finally:
        _called.reset(token)


# Backward passes that nobody trains with.


def leaves_below(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from `outputs` brings gradients to, but for what functions in it run by themselves."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        following = [child for child, _ in node.next_functions if child not in seen]
        seen.update(following)
        waiting += following
    return found


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether anything waits for the gradient of `parameter`."""
    return any(getattr(parameter, kind) for kind in GRADIENT_HOOKS)


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """What waits for the gradients of `parameters` is not told of those made in here.

    DeepSpeed's ZeRO 1 and 2 would send them to the other ranks, and an optimizer that works layer by layer (GaLore) or
    parameter by parameter (LOMO) would move the weights.
    """
    # torch calls what the dict holds at that time; handles that remove a hook know the dict, so it stays the same one.
    found = [
        (hooks, dict(hooks))
        for parameter in parameters
        for kind in GRADIENT_HOOKS
        if (hooks := getattr(parameter, kind))
    ]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


# How far tensors are off, by L2 norms in double precision; those of several tensors are of all as one vector. None of
# these synchronises.

NUM_PARTS, SMALLEST_PART = 64, 4096
"""Parts of a tensor that are taken into doubles one after the other, and the least number of elements of one."""


def relative_error(exact: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """The L2 norm of the difference over that of `exact`.

    inf where the difference alone is not finite; 0 where `exact` is zero or not finite itself, which codecs keep so.
    """
    norm = l2_norm(exact)
    error = difference_norm(exact, other) / norm
    return torch.where(torch.isfinite(norm) & (norm > 0), error.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)


@torch.no_grad()
def l2_norm(tensors: Iterable[Tensor]) -> Tensor:
    return _joined([torch.linalg.vector_norm(part.to(_wide(part))) for tensor in tensors for (part,) in _parts(tensor)])


@torch.no_grad()
def difference_norm(exact: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    return _joined(
        [
            torch.linalg.vector_norm(right.to(_wide(right), copy=True).add_(left, alpha=-1))  # no sub for bool
            for pair in zip(exact, other, strict=True)
            for left, right in _parts(*pair)
        ]
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _parts(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same parts of tensors of one shape; the whole ones where they do not fill their memory in one order."""
    order = sorted(range(tensors[0].dim()), key=tensors[0].stride, reverse=True)
    turned = [tensor.permute(order) for tensor in tensors]
    if not all(tensor.is_contiguous() for tensor in turned):
        return [tensors]
    size = max(SMALLEST_PART, -(-tensors[0].numel() // NUM_PARTS))
    return zip(*(tensor.view(-1).split(size) for tensor in turned), strict=True)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    """The norm of a vector whose parts have these."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
