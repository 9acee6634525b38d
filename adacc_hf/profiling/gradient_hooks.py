"""Backward passes that nobody trains with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

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
