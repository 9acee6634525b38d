"""Backward passes that nobody trains with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """What waits for the gradients of `parameters` is not told of those made in here.

    DeepSpeed's ZeRO 1 and 2 would send them to the other ranks, and an optimizer that works layer by layer would move
    the weights.
    """
    # torch calls what the dict holds at that time; handles that remove a hook know the dict, so it stays the same one.
    found = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._post_accumulate_grad_hooks)]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)
