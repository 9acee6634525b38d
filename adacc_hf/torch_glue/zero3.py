"""Parameters that DeepSpeed's ZeRO 3 has divided among ranks, and how its hooks gather them for a block.

ZeRO 3 registers hooks on every module. The hooks gather the module's parameters from all ranks before its forward and
its backward, and free them afterwards. Inside a block, the gathering depends on what DeepSpeed has gathered early. It
must be no part of the block's operators, so that all calls of the block run the same operators, and each saved tensor
can be recomputed. So the parameters of a block are gathered together, by the hooks on the block itself, as for
DeepSpeed's leaf modules (`deepspeed.utils.set_z3_leaf_modules`) and for blocks that FSDP2 shards.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.torch_glue.private import UNDISABLED, forward_hooks, forward_pre_hooks, version_of, viewed_tensor
from adacc_hf.torch_glue.tensors import kept_by_autograd

# Python modules that define ZeRO 3's hooks on modules, and a wrapper around some of these hooks.
_HOOK_MODULES = ("deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.nvtx")
# Hooks that only add identity functions to autograd's graph, and the attributes of a module with these functions, whose
# backward gathers and frees parameters.
_GRAPH_HOOKS = ("_pre_backward_module_hook", "_post_backward_module_hook")
_GRAPH_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")
_COUNTERS = ("ds_grads_remaining", "applied_pre_backward_ref_cnt")
"""Attributes that the hooks create in a module's first forward. They exist from the start, because Dynamo's guards
compare the names of a module's attributes."""
_IS_LEAF = "_z3_leaf"  # of a module, True if its hook gathers the parameters of all modules inside
_OTHERS_PARAMETERS = "_external_params"  # of a module: the parameters of other modules that it reads
DIVIDED = "ds_id"  # of each parameter that ZeRO 3 divides, and of each module
# Of the names of DeepSpeed's attributes.
_PREFIXES = ("ds_", "_z3_", _OTHERS_PARAMETERS, "_original_parameters", *_GRAPH_FUNCTIONS, *_COUNTERS)


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return True if ZeRO 3 has divided `parameter` among ranks, also while the parameter is gathered."""
    return hasattr(parameter, DIVIDED)


def without_zero3(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module or parameter without those of DeepSpeed, which lead to all other parameters."""
    if DIVIDED not in attributes:
        return attributes
    return {name: value for name, value in attributes.items() if not name.startswith(_PREFIXES)}


class _Identity(Function):
    """Identity in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def gather_together(block: nn.Module, set_attribute: Callable[[nn.Module, str, Any], None]) -> Callable[[], None]:
    """Let ZeRO 3's hooks on `block` gather and free the parameters of all modules inside, and remove the hooks on these
    modules. Return a function that restores the hooks. Attributes of modules are changed by `set_attribute`.

    The hooks' identity functions in autograd's graph stay, because the order in which autograd adds up gradients
    depends on them. Nothing is done to a block without such hooks.
    """
    changed: list[tuple[dict[int, Any], dict[int, Any]]] = []  # (the hooks of a module, a copy from before the change)

    def restore() -> None:
        while changed:
            hooks, before = changed.pop()
            added = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | added)

    if not any(map(_is_of_zero3, forward_pre_hooks(block).values())):
        return restore
    inner = _inner_modules(block)
    others = [vars(module).get(_OTHERS_PARAMETERS) or {} for module in (block, *inner)]
    set_attribute(block, _OTHERS_PARAMETERS, {key: value for each in others for key, value in each.items()})
    set_attribute(block, _IS_LEAF, True)
    for module, name in product((block, *inner), _COUNTERS):
        vars(module).setdefault(name, 0)
    for module in inner:
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            # Dynamo must trace the hooks that stay. Some of them are disabled for it.
            kept = {key: hook for key, hook in hooks.items() if not _gathers(hook)}
            kept |= {key: getattr(hook, UNDISABLED, hook) for key, hook in kept.items() if is_identity_hook(hook)}
            if kept != hooks:
                changed.append((hooks, dict(hooks)))
                hooks.clear()
                hooks.update(kept)
        for name in _GRAPH_FUNCTIONS:
            if name in vars(module):
                set_attribute(module, name, _Identity)
    return restore


def gathers_inside(block: nn.Module) -> bool:
    """Return True if ZeRO 3 gathers the parameters of single modules in `block` (before `gather_together`)."""
    return any(_gathers(hook) for module in _inner_modules(block) for hook in forward_pre_hooks(module).values())


def _inner_modules(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if module is not block]


def _is_of_zero3(hook: Any) -> bool:
    return getattr(hook, "__module__", None) in _HOOK_MODULES


def _gathers(hook: Any) -> bool:
    """Return True for a hook with which ZeRO 3 gathers or frees the parameters of a module."""
    return _is_of_zero3(hook) and not is_identity_hook(hook)


def is_identity_hook(hook: Any) -> bool:
    """Return True for a hook of ZeRO 3 that only adds an identity to autograd's graph after `gather_together`."""
    return _is_of_zero3(hook) and hook.__name__ in _GRAPH_HOOKS


def without_gathered_memory(tensor: torch.Tensor) -> torch.Tensor | PartitionedView:
    """Return an object from which `saved_tensor` returns `tensor` again, without memory that ZeRO 3 has gathered."""
    return PartitionedView.of(tensor) or kept_by_autograd(tensor)


def saved_tensor(content: torch.Tensor | PartitionedView) -> torch.Tensor:
    """Return the tensor for the result of `without_gathered_memory`. A parameter must be gathered."""
    return content.tensor() if isinstance(content, PartitionedView) else content


class PartitionedView:
    """View of a parameter that ZeRO 3 divides among ranks, without a reference to the gathered memory."""

    __slots__ = ("_geometry", "_parameter")

    def __init__(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        self._parameter = parameter
        self._geometry = (view.shape, view.stride(), view.storage_offset() - parameter.storage_offset())

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PartitionedView | None:
        """Return `tensor` as a view of a partitioned parameter, or None if `tensor` is not one."""
        for parameter in (tensor, viewed_tensor(tensor)):
            if parameter is not None and is_partitioned(parameter):
                return cls(parameter, tensor)
        return None

    @property
    def _version(self) -> int:
        """Autograd's version counter of the parameter. Gathering the parameter does not change the counter."""
        return version_of(self._parameter)

    def tensor(self) -> torch.Tensor:
        """Return the view of the parameter as it is gathered now."""
        size, stride, offset = self._geometry
        with torch.no_grad():
            return self._parameter.as_strided(size, stride, self._parameter.storage_offset() + offset)
