"""Backward pass over fake tensors.

Torch's autograd engine needs the streams of the tensors' device, so the engine cannot run if the device is missing.
This module walks autograd's graph in the engine's order. Nodes that accumulate gradients run first, then the newest
node. A node's saved tensors are freed with the node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from adacc_hf.torch_glue.compat import graph_owner, owns_graph_node
from adacc_hf.torch_glue.private import input_metadata, sequence_number, storage_use_count
from adacc_hf.torch_glue.tensors import calling_node

EdgeKey = tuple[str, int]
"""Key of a node in autograd's graph: ("node", autograd's sequence number), or ("leaf", id of the node's leaf
tensor)."""


class FakeBackward:
    """Backward engine for fake tensors, with callbacks that run when a tensor's gradient is complete."""

    def __init__(self) -> None:
        self._calls: dict[tuple[EdgeKey, int], list[Callable[[], None]]] = {}

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        """Register a callback for the `run` of a graph with `tensor`, called when the gradient of `tensor` is complete.

        A `run` of another graph before, such as a block's that is measured alone, keeps it.
        """
        key = ("leaf", id(tensor)) if tensor.grad_fn is None else _node_key(tensor.grad_fn)
        self._calls.setdefault((key, tensor.output_nr), []).append(call)

    def run(self, loss: torch.Tensor) -> None:
        """Run backward from `loss`, and accumulate the gradients of all leaves. `loss` is detached, and its graph is
        freed."""
        backward_pass = _FakeBackwardPass(graph_owner(loss), self._calls)
        nodes = set(backward_pass.nodes)
        loss_gradient = torch.ones_like(loss)
        loss.detach_()
        with torch.no_grad():
            backward_pass.run(loss_gradient)
        self._calls = {key: calls for key, calls in self._calls.items() if key[0] not in nodes}


def fake_gradients(
    result: torch.Tensor, inputs: Sequence[torch.Tensor], gradient: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `inputs`, given the `gradient` of `result`.

    `inputs` are leaves whose `grad` is None. The graph of `result` is freed.
    """
    backward_pass = _FakeBackwardPass(graph_owner(result), {})
    with suppress(RuntimeError):  # a view cannot be detached in place, and its node saves no tensor
        result.detach_()
    with torch.no_grad():
        backward_pass.run(gradient)
    gradients = tuple(tensor.grad for tensor in inputs)
    for tensor in inputs:
        tensor.grad = None
    return gradients


class _FakeBackwardPass:
    """State of one backward pass over fake tensors.

    The pass owns autograd's graph, because a node frees its saved tensors only if no other object refers to the node.
    """

    def __init__(self, root: Any, calls: dict[tuple[EdgeKey, int], list[Callable[[], None]]]) -> None:
        self._calls = calls
        self._waiting = _count_edges(root)
        self._ready: list[tuple[float, int, Any]] = []
        self._gradients: dict[EdgeKey, list[torch.Tensor | None]] = {}
        self._owners: dict[EdgeKey, list[Any]] = {}
        """For each node of autograd's graph, the earlier nodes that keep it alive. Nodes with Python objects of their
        own are left out, because these objects keep them alive."""
        self._root = root

    @property
    def nodes(self) -> Iterable[EdgeKey]:
        """Keys of the nodes of autograd's graph."""
        return self._waiting.keys()

    def run(self, loss_gradient: torch.Tensor) -> None:
        root, self._root = self._root, None
        self._gradients[_node_key(root)] = [loss_gradient]
        self._make_ready(root)
        del root, loss_gradient
        while self._ready:
            _, _, node = heapq.heappop(self._ready)
            self._visit(node)

    def _make_ready(self, node: Any) -> None:
        # Accumulating nodes have priority, then the newest node. The number breaks ties without comparing nodes.
        kind, number = _node_key(node)
        heapq.heappush(self._ready, (float("-inf") if kind == "leaf" else -number, number, node))

    def _visit(self, node: Any) -> None:
        key = _node_key(node)
        inputs = self._gradients.pop(key)
        for position, gradient in enumerate(inputs):
            if gradient is not None:
                for call in self._calls.pop((key, position), ()):
                    call()
        if key[0] == "leaf":
            _accumulate_gradient(node.variable, inputs[0])
            return
        owners = [node, *self._owners.pop(key, ())]
        with calling_node(node):  # hooks that unpack saved tensors ask for the current node
            outputs = _apply_node(node, inputs)
        inputs.clear()
        for position, (child, slot) in enumerate(node.next_functions):
            if child is not None:
                if not owns_graph_node(child):
                    self._owners.setdefault(_node_key(child), []).extend(owners)
                gradient, outputs[position] = outputs[position], None
                self._pass_on(child, slot, gradient)
                del gradient

    def _pass_on(self, child: Any, slot: int, gradient: torch.Tensor | None) -> None:
        key = _node_key(child)
        metadata = input_metadata(child)
        inputs = self._gradients.setdefault(key, [None] * len(metadata))
        if gradient is not None:
            gradient = _match_metadata(gradient, metadata[slot])
            earlier, inputs[slot] = inputs[slot], None
            inputs[slot] = gradient if earlier is None else _gradient_sum(earlier, gradient)
        self._waiting[key] -= 1
        if self._waiting[key] > 0:
            return
        if any(gradient_input is not None for gradient_input in inputs):
            self._make_ready(child)
        else:  # like torch's engine, skip a node without any gradient
            del self._gradients[key]
            for grandchild, position in child.next_functions:
                if grandchild is not None:
                    self._pass_on(grandchild, position, None)


def _node_key(node: Any) -> EdgeKey:
    variable = getattr(node, "variable", None)
    return ("node", sequence_number(node)) if variable is None else ("leaf", id(variable))


def _count_edges(root: Any) -> dict[EdgeKey, int]:
    """Return the number of incoming edges of each node of autograd's graph below `root`."""
    counts: dict[EdgeKey, int] = {_node_key(root): 0}
    stack = [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None:
                key = _node_key(child)
                if key not in counts:
                    stack.append(child)
                counts[key] = counts.get(key, 0) + 1
    return counts


def _apply_node(node: Any, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Run a node of autograd's graph on the gradients of its results. Return the gradients of its inputs."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        filled = [
            torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device) if gradient is None else gradient
            for gradient, metadata in zip(gradients, input_metadata(node), strict=True)
        ]
        result = node.apply(*filled)
    else:
        result = node(*gradients)
    return list(result) if isinstance(result, tuple) else [result]


def _match_metadata(gradient: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Return the fake tensor `gradient`, summed to the shape and cast to the dtype in `metadata`."""
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient if gradient.dtype is metadata.dtype else gradient.to(metadata.dtype)


def _gradient_sum(earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    if _is_sole_owner(earlier):
        return earlier.add_(later)
    return earlier + later


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """Return True if no other fake tensor uses the storage of `tensor`, so that a gradient may be added in place."""
    storage = tensor.untyped_storage()
    return tensor.is_contiguous() and storage_use_count(storage) <= _SOLE_USE_COUNT


def _accumulate_gradient(variable: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add `gradient` to `variable.grad`. The first gradient is assigned, without a copy if the strides match."""
    if gradient is None:
        return
    if variable.grad is not None:
        variable.grad.add_(gradient)
    elif gradient.stride() == variable.stride():
        variable.grad = gradient.detach()
    else:
        variable.grad = torch.empty_like(variable).copy_(gradient)


def _sole_use_count() -> int:
    """Return the use count of a storage that only one tensor uses. If the storage of a gradient has this use count,
    another gradient may be added to it in place."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return storage_use_count(storage)


_SOLE_USE_COUNT = _sole_use_count()
"""Use count of a storage that only one tensor owns. The storage's own Python object counts too."""
