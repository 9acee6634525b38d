"""Backward over tensors without memory.

torch's own engine asks for the streams of the device that the tensors say they are on, so it cannot run where that
device is missing. This one walks the same graph in the same order: the node made last goes first, gradients are
accumulated before that, and what a node saved goes with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import torch

from adacc_hf.torch_glue.compat import owner_of, owns_its_node
from adacc_hf.torch_glue.private import input_metadata, sequence_number, storage_owners
from adacc_hf.torch_glue.tensors import calling

EdgeKey = tuple[str, int]
"""What tells nodes of a graph apart: the number that autograd gave it, or the leaf that it accumulates for."""


class FakeBackward:
    """Runs backward, and calls what was asked for when a tensor's gradient is there."""

    def __init__(self) -> None:
        self._calls: dict[tuple[EdgeKey, int], list[Callable[[], None]]] = {}

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        """Have `call` called by the next `run` once the gradient of `tensor` is there."""
        key = ("leaf", id(tensor)) if tensor.grad_fn is None else _key(tensor.grad_fn)
        self._calls.setdefault((key, tensor.output_nr), []).append(call)

    def run(self, loss: torch.Tensor) -> None:
        """Give every leaf that `loss` depends on its gradient. `loss` is detached from its graph, which is let go."""
        walk = _BackwardPass(owner_of(loss), self._calls)
        self._calls = {}
        first = torch.ones_like(loss)
        loss.detach_()
        with torch.no_grad():
            walk.run(first)


class _BackwardPass:
    """One backward. It owns the graph: nothing else may hold a node that is to let go of what it saved."""

    def __init__(self, root: Any, calls: dict[tuple[EdgeKey, int], list[Callable[[], None]]]) -> None:
        self._calls = calls
        self._waiting = _count_edges(root)
        self._ready: list[tuple[float, int, Any]] = []
        self._gradients: dict[EdgeKey, list[torch.Tensor | None]] = {}
        self._owners: dict[EdgeKey, list[Any]] = {}
        """What keeps nodes alive that their Python objects do not own."""
        self._root = root

    def run(self, first: torch.Tensor) -> None:
        root, self._root = self._root, None
        self._gradients[_key(root)] = [first]
        self._make_ready(root)
        del root, first
        while self._ready:
            _, _, node = heapq.heappop(self._ready)
            self._visit(node)

    def _make_ready(self, node: Any) -> None:
        # A node that accumulates goes first, then the one made last; the key breaks ties without comparing nodes.
        kind, number = _key(node)
        heapq.heappush(self._ready, (float("-inf") if kind == "leaf" else -number, number, node))

    def _visit(self, node: Any) -> None:
        key = _key(node)
        inputs = self._gradients.pop(key)
        for position, gradient in enumerate(inputs):
            if gradient is not None:
                for call in self._calls.pop((key, position), ()):
                    call()
        if key[0] == "leaf":
            _accumulate(node.variable, inputs[0])
            return
        owners = [node, *self._owners.pop(key, ())]
        with calling(node):  # who unpacks what the node saved asks which node it is for
            outputs = _apply(node, inputs)
        inputs.clear()
        for position, (child, slot) in enumerate(node.next_functions):
            if child is not None:
                if not owns_its_node(child):
                    self._owners.setdefault(_key(child), []).extend(owners)
                gradient, outputs[position] = outputs[position], None
                self._pass_on(child, slot, gradient)
                del gradient

    def _pass_on(self, child: Any, slot: int, gradient: torch.Tensor | None) -> None:
        key = _key(child)
        metadata = input_metadata(child)
        inputs = self._gradients.setdefault(key, [None] * len(metadata))
        if gradient is not None:
            gradient = _fitted(gradient, metadata[slot])
            earlier, inputs[slot] = inputs[slot], None
            inputs[slot] = gradient if earlier is None else _sum(earlier, gradient)
        self._waiting[key] -= 1
        if self._waiting[key] > 0:
            return
        if any(received is not None for received in inputs):
            self._make_ready(child)
        else:  # as torch's engine: a node that no gradient reaches passes on none
            del self._gradients[key]
            for grandchild, position in child.next_functions:
                if grandchild is not None:
                    self._pass_on(grandchild, position, None)


def _key(node: Any) -> EdgeKey:
    variable = getattr(node, "variable", None)
    return ("node", sequence_number(node)) if variable is None else ("leaf", id(variable))


def _count_edges(root: Any) -> dict[EdgeKey, int]:
    """How many edges of the graph lead to each node."""
    counts: dict[EdgeKey, int] = {_key(root): 0}
    stack = [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None:
                key = _key(child)
                if key not in counts:
                    stack.append(child)
                counts[key] = counts.get(key, 0) + 1
    return counts


def _apply(node: Any, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of a node's inputs."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        filled = [_zeros(m) if g is None else g for g, m in zip(gradients, input_metadata(node), strict=True)]
        result = node.apply(*filled)
    else:
        result = node(*gradients)
    return list(result) if isinstance(result, tuple) else [result]


def _zeros(metadata: Any) -> torch.Tensor:
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _fitted(gradient: torch.Tensor, metadata: Any) -> torch.Tensor:
    """`gradient` in the shape and dtype of the tensor that it belongs to."""
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient if gradient.dtype is metadata.dtype else gradient.to(metadata.dtype)


def _sum(earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, in place where nobody else sees the first."""
    if _is_sole_owner(earlier):
        return earlier.add_(later)
    return earlier + later


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return tensor.is_contiguous() and storage_owners(storage) <= _ALONE


def _accumulate(variable: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add `gradient` to that of `variable`; the first is taken as it is if it is laid out alike."""
    if gradient is None:
        return
    if variable.grad is not None:
        variable.grad.add_(gradient)
    elif gradient.stride() == variable.stride():
        variable.grad = gradient.detach()
    else:
        variable.grad = torch.empty_like(variable).copy_(gradient)


def _owners_when_alone() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return storage_owners(storage)


_ALONE = _owners_when_alone()
"""What torch counts for a storage that one tensor and the storage's own Python object hold."""
