"""Forward hook of a whole model (`ModelHook`), and mapping of a call's arguments to parameter names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


class ModelHook:
    """Forward hook of a model that calls `call`. If the model is copied or pickled, the copy's hook does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, ()


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return a dict of all arguments of a call of `module`, by the parameter names of its forward.

    Return None if a positional argument has no name, because the forward takes `*args`.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())[: len(args)] if args else []
    if len(parameters) < len(args) or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return {**{p.name: argument for p, argument in zip(parameters, args, strict=True)}, **kwargs}
