"""Tensors of which this rank has a part (DTensor), or whose values are still on their way from other ranks.

Operators run on the parts, so a tape knows these alone. Autograd saves the whole: what it gets back must be one again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adacc_hf.tape.replay import copy_with_storage

_INDICES = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_coo: (Tensor._indices,),
}
"""What tells where the elements of a sparse tensor are."""
PLAIN = frozenset({Tensor, nn.Parameter})
"""Classes of tensors that are nothing else. Where hundreds pass in a step, these are asked for without a call."""


def runs_on_parts(kind: type) -> bool:
    """Whether operators on tensors of that class are made of others (DTensor), or wait first (what is on its way)."""
    return hasattr(kind, "_local_tensor") or hasattr(kind, "trigger_wait")


def local_of(tensor: Tensor) -> Tensor:
    """The part that this rank has, once it has arrived; a plain tensor itself."""
    return tensor if is_plain(tensor) else arrived(getattr(tensor, "_local_tensor", tensor))


def arrived(tensor: Tensor) -> Tensor:
    """What has come, of a tensor that is on its way from other ranks; any other tensor itself."""
    return tensor if is_plain(tensor) or not hasattr(tensor, "trigger_wait") else tensor.trigger_wait()


def spec_of(tensor: Tensor) -> Any:
    """What makes a DTensor of this rank's part of it; None for a plain tensor."""
    return None if is_plain(tensor) else getattr(tensor, "_spec", None)


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
    if not wraps_others(local):
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


def copied(tensor: Tensor) -> Tensor:
    """`tensor` on a copy of its storage."""
    return whole(copy_with_storage(local_of(tensor)), spec_of(tensor))


def _elements(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def is_plain(tensor: Tensor) -> bool:
    """Whether `tensor` is nothing but a tensor."""
    return type(tensor) in PLAIN


# Which node of autograd's graph runs now.
#
# torch's engine knows that of its own backward only. A backward that calls the nodes itself, as that over tensors
# without
# memory does, says so here.

_called: ContextVar[Any] = ContextVar("adacc_hf_called_node", default=None)


def current_node() -> Any:
    """The node whose backward runs in this thread, or None outside of any backward."""
    node = torch._C._current_autograd_node()
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

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps a parameter's hooks: those called before its gradient is there, and after."""


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether anything waits for the gradient of `parameter`."""
    return any(getattr(parameter, kind) for kind in _KINDS)


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """What waits for the gradients of `parameters` is not told of those made in here.

    DeepSpeed's ZeRO 1 and 2 would send them to the other ranks, and an optimizer that works layer by layer (GaLore) or
    parameter by parameter (LOMO) would move the weights.
    """
    # torch calls what the dict holds at that time; handles that remove a hook know the dict, so it stays the same one.
    found = [(hooks, dict(hooks)) for parameter in parameters for kind in _KINDS if (hooks := getattr(parameter, kind))]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)
