"""Helpers for tensors: tensors that wrap other tensors (DTensor, sparse, quantized), autograd nodes, and norms.

Operators on a DTensor run on its local tensor, so the operators of a block are recorded with local tensors only.
Autograd saves the DTensor, so the tensor returned to autograd must be a DTensor again.
"""

from __future__ import annotations

import ctypes
import math
import zlib
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
"""Methods that return the indices of the elements that a sparse tensor stores, by sparse layout."""
PLAIN = frozenset({Tensor, nn.Parameter})  # read directly by code that tests hundreds of tensors in a step


def runs_on_parts(kind: type) -> bool:
    """Return True if tensors of class `kind` wrap tensors on which operators run (DTensor and the like)."""
    return hasattr(kind, LOCAL_TENSOR) or hasattr(kind, "trigger_wait")


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a DTensor, after waiting for a pending collective, or any other tensor."""
    return tensor if is_plain(tensor) else wait_if_async(getattr(tensor, LOCAL_TENSOR, tensor))


def wait_if_async(tensor: Tensor) -> Tensor:
    """Wait for an asynchronous collective, and return its result. Return any other tensor unchanged."""
    return tensor if is_plain(tensor) or not hasattr(tensor, "trigger_wait") else tensor.trigger_wait()


def spec_of(tensor: Tensor) -> Any:
    """Return the spec of a DTensor (mesh, placements, shape), or None for any other tensor."""
    return None if is_plain(tensor) else getattr(tensor, SPEC, None)


def to_dtensor(local: Tensor, spec: Any) -> Tensor:
    """Return the DTensor with the local tensor `local`, or `local` itself if `spec` is None."""
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)


def parts_with_memory(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors with the memory of `tensor` on this rank (codes and scales in torchao)."""
    local = local_of(tensor)
    if local.layout in _INDICES:
        return [_stored_elements(local), *(indices(local) for indices in _INDICES[local.layout])]
    if not is_traceable_wrapper_subclass(local):
        return [local]
    names, _ = local.__tensor_flatten__()
    return [part for name in names for part in parts_with_memory(getattr(local, name))]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor on this rank, or of the values of a sparse or nested tensor."""
    local = local_of(tensor)
    return (local if local.layout is torch.strided else _stored_elements(local)).untyped_storage()


def wraps_others(tensor: Tensor) -> bool:
    """Return True if `tensor` has no memory of its own, but wraps other tensors."""
    return not is_plain(tensor) and is_traceable_wrapper_subclass(tensor)


def copy_with_storage(base: torch.Tensor) -> torch.Tensor:
    """Copy the whole storage of the tensor `base`. Return a tensor on the copy, with the layout and dtype of `base`."""
    storage = base.untyped_storage().clone()
    copy = torch.empty(0, dtype=base.dtype, device=base.device)
    return copy.set_(storage, base.storage_offset(), base.shape, base.stride())


Checksum = int | Tensor
_WIDTH = 1024
"""Number of columns of the table of which `weighted_sum` computes a checksum."""


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def checksum_of_bytes(elements: Tensor) -> Checksum:
    """Return a checksum of a dense tensor of bytes, which depends on their order. It needs almost no memory."""
    if elements.device.type != "cpu":
        return weighted_sum(elements)
    return zlib.crc32((ctypes.c_char * elements.numel()).from_address(elements.data_ptr()))  # numpy would fix the size


def weighted_sum(elements: Tensor) -> Tensor:
    """Return a checksum of bytes, computed on their device in two passes. It depends on the order, and wraps around.

    The bytes are 32-bit words in a table, whose row sums and column sums are weighted by their position. In sums of
    64-bit words, two changed signs would cancel.
    """
    elements = elements if elements.data_ptr() % 4 == 0 else elements.clone()
    num_bytes = elements.numel() // (4 * _WIDTH) * (4 * _WIDTH)
    table = elements[:num_bytes].view(torch.int32).view(-1, _WIDTH)
    return _weighted(table.sum(0)) + 31 * _weighted(table.sum(1)) + 37 * _weighted(elements[num_bytes:].long())


def _weighted(numbers: Tensor) -> Tensor:
    return (numbers * (torch.arange(len(numbers), device=numbers.device) * 2654435762 + 1)).sum()


def clone_with_storage(tensor: Tensor) -> Tensor:
    """Copy the whole storage of `tensor` (or DTensor). Return a tensor with the same layout on it."""
    return to_dtensor(copy_with_storage(local_of(tensor)), spec_of(tensor))


def _stored_elements(tensor: Tensor) -> Tensor:
    return coo_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()


def is_plain(tensor: Tensor) -> bool:
    """Return True if the class of `tensor` is `torch.Tensor` or `nn.Parameter`, and not a subclass such as DTensor."""
    return type(tensor) in PLAIN


def kept_by_autograd(tensor: Tensor) -> Tensor:
    """Return what autograd without hooks keeps of a saved tensor: a leaf itself, whose memory `tensor.data = ...` may
    replace before backward, or else an alias."""
    return tensor if tensor.is_leaf else tensor.detach()


def bytes_in_order(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor` in the order of its strides, without a copy if the tensor is dense (has no gaps)."""
    in_order = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return in_order.contiguous().reshape(-1).view(torch.uint8)


def is_fake(tensor: Tensor) -> bool:
    """Return True for a FakeTensor, which has no data."""
    return hasattr(tensor, "fake_mode")


# The autograd node that is running.
#
# torch's engine knows the node of its own backward only. Code that calls nodes itself, such as the backward over fake
# tensors, sets the node with `calling_node`.

_called: ContextVar[Any] = ContextVar("adacc_hf_called_node", default=None)


def current_node() -> Any:
    """Return the autograd node whose backward is running in this thread, or None outside any backward."""
    node = current_autograd_node()
    return _called.get() if node is None else node


@contextmanager
def calling_node(node: Any) -> Iterator[None]:
    """Make `current_node` return `node` inside the `with` block, except while the engine runs another node."""
    token = _called.set(node)
    try:
        yield
    finally:
        _called.reset(token)


# Backward passes outside training steps.


def gradient_leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaf tensors into whose `.grad` a backward from `outputs` accumulates gradients, without those that
    only a nested backward (of an `autograd.Function`) reaches."""
    queue: list[Any] = [output.grad_fn for output in outputs]
    visited, leaves = set(queue), []
    while queue:
        node = queue.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        children = [child for child, _ in node.next_functions if child not in visited]
        visited.update(children)
        queue += children
    return leaves


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return True if `parameter` has hooks that run before or after its gradient is accumulated."""
    return any(getattr(parameter, kind) for kind in GRADIENT_HOOKS)


@contextmanager
def without_gradient_hooks(
    parameters: Iterable[torch.Tensor], module_hooks: Iterable[dict[int, Any]] = ()
) -> Iterator[None]:
    """Disable the gradient hooks of `parameters`, and the backward hooks of modules in the dicts `module_hooks`, inside
    the `with` block.

    In gradient hooks, DeepSpeed's ZeRO 1 and 2 send the gradients to other ranks, and an optimizer that steps per layer
    (GaLore) or per parameter (LOMO) changes the weights. In a backward hook of a module, ZeRO 3 sends the gradients of
    a leaf module. A backward hook of a module is replaced by a function that does nothing, because torch adds nodes to
    autograd's graph for a module with hooks.
    """
    # The same dicts are emptied and refilled, because handles that remove a hook refer to them.
    own_hooks = [getattr(parameter, kind) for parameter in parameters for kind in GRADIENT_HOOKS]
    saved_hooks = [(hooks, dict(hooks)) for hooks in own_hooks if hooks]
    for hooks, _ in saved_hooks:
        hooks.clear()
    for hooks in module_hooks:
        saved_hooks.append((hooks, dict(hooks)))
        hooks.update(dict.fromkeys(hooks, lambda *_: None))
    try:
        yield
    finally:
        for hooks, before in saved_hooks:
            hooks.update(before)


@contextmanager
def gradients_set_aside(leaves: Iterable[torch.Tensor], module_hooks: Iterable[dict[int, Any]] = ()) -> Iterator[None]:
    """Set the gradients of `leaves` to None, and disable hooks (`without_gradient_hooks`), inside the `with` block."""
    gradients = [(leaf, leaf.grad) for leaf in {id(leaf): leaf for leaf in leaves}.values()]
    for leaf, _ in gradients:
        leaf.grad = None
    try:
        with without_gradient_hooks([leaf for leaf, _ in gradients], module_hooks):
            yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient


# Distances of tensors: L2 norms in double precision. Several tensors are treated as one vector. These functions do not
# synchronise.

NUM_PARTS, SMALLEST_PART = 64, 4096  # of a cast to double precision: number of parts, least size of one


def relative_error(exact: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of `exact` - `other`, divided by the L2 norm of `exact`. Each list counts as one vector.

    The result is inf if `exact` is finite and the difference is not, and 0 if `exact` is zero or not finite, because
    codecs preserve such tensors.
    """
    norm = l2_norm(exact)
    error = difference_norm(exact, other) / norm
    return torch.where(torch.isfinite(norm) & (norm > 0), error.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)


@torch.no_grad()
def l2_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of `tensors`, which count as one vector."""
    parts = (part for tensor in tensors for (part,) in _matching_parts(tensor))
    return _combined_norm([torch.linalg.vector_norm(part.to(_double_dtype(part))) for part in parts])


@torch.no_grad()
def difference_norm(exact: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of the difference between two lists of tensors. Each list counts as one vector."""
    return _combined_norm(
        [
            # `add_`, because subtraction of bool tensors is not supported.
            torch.linalg.vector_norm(other_part.to(_double_dtype(other_part), copy=True).add_(exact_part, alpha=-1))
            for pair in zip(exact, other, strict=True)
            for exact_part, other_part in _matching_parts(*pair)
        ]
    )


def _double_dtype(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _matching_parts(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors of one shape into parts with the elements at the same indices: each item has a part of every
    tensor. If the layouts of the tensors differ or have gaps, the only item has the whole tensors."""
    order = sorted(range(tensors[0].dim()), key=tensors[0].stride, reverse=True)
    permuted = [tensor.permute(order) for tensor in tensors]
    if not all(tensor.is_contiguous() for tensor in permuted):
        return [tensors]
    size = _part_size(tensors[0])
    return zip(*(tensor.view(-1).split(size) for tensor in permuted), strict=True)


def _part_size(tensor: Tensor) -> int:
    """Return the number of elements of `tensor` that are cast to double precision at a time."""
    return max(SMALLEST_PART, -(-tensor.numel() // NUM_PARTS))


def double_precision_bytes(tensor: Tensor) -> int:
    """Return the bytes that `relative_error` takes at most for two tensors like `tensor` without gaps."""
    return 2 * _double_dtype(tensor).itemsize * min(tensor.numel(), _part_size(tensor))


def _combined_norm(norms: Sequence[Tensor]) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
