"""The time of an operator that was never run: what the device's peaks allow, plus its launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from adacc_hf.ahead.devices import Device


def operator_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    """Milliseconds of one operator: max(operations / peak, bytes moved / bandwidth) + launch.

    Tensors among `args`, `kwargs` and `results` may be fake or on meta. A view takes no time.
    """
    # Torch asks each fake tensor for its device by an operator, prim::device, more often than it computes.
    if target.is_view or target.namespace == "prim":
        return 0.0
    given, made = _tensors((args, kwargs)), _tensors(results)
    moved_ms = 1e3 * sum(map(_touched_bytes, [*given, *made])) / device.bandwidth_bytes
    return max(moved_ms, _product_ms(device, target, args, kwargs, results)) + device.launch_ms


def moved_ms(device: Device, num_bytes: float) -> float:
    """Milliseconds to read or write `num_bytes` in one launch."""
    return 1e3 * num_bytes / device.bandwidth_bytes + device.launch_ms


def _product_ms(device: Device, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> float:
    formula = flop_registry.get(_counted_as(target))
    if formula is None:
        return 0.0
    dtype = str(_tensors((args, kwargs))[0].dtype).removeprefix("torch.")
    rate = device.flops.get(dtype, device.flops["float32"])
    return 1e3 * formula(*_with_all_heads(target, args), **kwargs, out_val=results) / rate


def _counted_as(target: Any) -> Any:
    """The operator whose count of operations stands for that of `target`."""
    if target.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return torch.ops.aten._scaled_dot_product_flash_attention
    if target.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return torch.ops.aten._scaled_dot_product_flash_attention_backward
    return target.overloadpacket


def _with_all_heads(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args`; for fused attention with a head of keys and values for every head of queries, as the kernels work.

    torch before 2.13 cannot count the operations of fewer.
    """
    if "scaled_dot_product" not in target._opname:
        return args
    first = 1 if target._opname.endswith("backward") else 0  # the gradient comes before the queries
    query, key, value = args[first : first + 3]
    heads = [tensor[:, :1].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]
    return (*args[: first + 1], *heads, *args[first + 3 :])


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of `tensor`; one that is repeated by a stride of 0 is read once."""
    lengths = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(lengths) * tensor.dtype.itemsize if tensor.numel() else 0


def _tensors(tree: Any) -> Sequence[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
