"""Which of a block's calls in a step is under way."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


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
