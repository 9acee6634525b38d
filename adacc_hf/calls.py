"""The calls of a block in one step: their names, and which of them is under way.

A model may call a block several times before backward: layers share their weights, or the loss calls the model twice.
Each call has a name of its own, and so a plan: the first that of its block, the others "block#2", "block#3".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


def call_name(block: str, number: int) -> str:
    """The name of the call of `block` with that number in a step, counted from 1."""
    return block if number == 1 else f"{block}#{number}"


def block_of_call(name: str) -> str:
    """The block of a call with that name."""
    return split_call(name)[0]


def split_call(name: str) -> tuple[str, int]:
    """The block of a call and its number in a step, counted from 1."""
    block, mark, number = name.rpartition("#")
    return (block, int(number)) if mark and number.isdigit() else (name, 1)


def num_calls(names: Iterable[str]) -> dict[str, int]:
    """How often each block is called in a step that has calls with these `names`."""
    found: dict[str, int] = {}
    for name in names:
        block, number = split_call(name)
        found[block] = max(number, found.get(block, 0))
    return found


class StepCount:
    """Counts one block's calls since the step began. Its backward, once it reaches any of them, ends the step.

    A step may end without a backward, by an exception say. So the count also begins anew once the graph of every call
    is gone, after as many calls as were expected, and with `reset`.
    """

    def __init__(self) -> None:
        self._number = 0
        self._hooks: list[RemovableHandle] = []

    def next_of(self, expected: int) -> int:
        """The number, from 0, of the call that begins now, out of so many that are `expected` in a step."""
        is_gone = bool(self._hooks) and all(hook.hooks_dict_ref() is None for hook in self._hooks)
        if is_gone or self._number >= expected:
            self.reset()
        return self._number

    def returned(self, result: Any) -> None:
        """Count a call that returned `result`, and begin anew once backward reaches it."""
        self._number += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._hooks.append(leaf.register_hook(self._reached))

    def reset(self) -> None:
        """Begin anew, and leave nothing on the graph. Harmless at any time."""
        self._number = 0
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _reached(self, _: torch.Tensor) -> None:
        self.reset()
