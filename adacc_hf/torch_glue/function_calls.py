"""Interception of the calls of `autograd.Function`s.

Patching `Function.apply` is not enough: code may have looked up the method before (`scale = Scale.apply`), and since
torch 2.14 this method is a C function. But in each release of torch, `apply` looks up attributes of the Function's
class: first the class of the context, under the caller's gradient mode, then `forward`, with gradients disabled, and
after the forward `setup_context`. So lookups of these attributes are intercepted, in the metaclass of all Functions. A
callback that the current thread has registered, the *watcher*, is then called in place of the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import Function, FunctionCtx, FunctionMeta

from adacc_hf.torch_glue.private import CONTEXT_CLASS
from adacc_hf.torch_glue.watchers import Watchers

Lookup = Callable[[Any, str], Any]  # from (class, attribute name) to the attribute


class ForwardCall:
    """One call of an `autograd.Function`, whose forward is about to run with gradients disabled."""

    def __init__(self, function: type[Function], has_gradients: bool) -> None:
        """Initialize. `has_gradients` is True if gradients were enabled where `apply` was called."""
        self.function = function
        self.args: tuple[Any, ...] = ()  # without the context
        self._has_gradients = has_gradients
        self._context: Any = None
        self._forward: Callable[..., Any]
        self._setup: Callable[..., Any] | None = None

    @property
    def saved(self) -> list[torch.Tensor]:
        """Tensors that the Function saves for backward. Autograd packs them right after the watcher has returned."""
        return saved_tensors(self._context) if self._has_gradients else []

    def run(self) -> Any:
        """Run the forward of the `autograd.Function`, then its `setup_context` if any. Return the forward's result."""
        if self._setup is None:
            return self._forward(self._context, *self.args)
        result = self._forward(*self.args)
        self._setup(self._context, self.args, result)
        return result

    def create_context(self, context_class: Callable[[], Any]) -> Any:
        """Create the context (`ctx`) of this call, as `apply` does. The next lookup of `forward` belongs to it."""
        self._context = context_class()
        _thread.begun = self
        return self._context

    def replace_forward(self, lookup: Lookup) -> Callable[..., Any]:
        """Return the function that `apply` calls in place of `forward`. It calls the current thread's watcher."""
        self._forward = lookup(self.function, "forward")
        self._setup = lookup(self.function, "setup_context") if has_setup(self.function) else None
        return self._watched_forward

    def _watched_forward(self, *args: Any) -> Any:
        self.args = args if self._setup is not None else args[1:]
        self._has_gradients &= any(isinstance(value, torch.Tensor) and value.requires_grad for value in self.args)
        watcher = _WATCHERS.current()
        result = self.run() if watcher is None else watcher(self)
        if self._setup is not None:
            _thread.set_up = self.function
        return result


Watcher = Callable[[ForwardCall], Any]
"""Type of a callback that gets a `ForwardCall`, calls its `run`, and returns the result of `run`."""


class _ThreadState(threading.local):
    """State of one thread while `apply` looks up the context class, `forward` and `setup_context` of a Function."""

    begun: ForwardCall | None = None
    """Call whose context was created, and whose `forward` has not been looked up yet."""
    set_up: type[Function] | None = None
    """Function class whose `setup_context` was already run by `ForwardCall.run`. `apply` looks up `setup_context`
    next."""


_thread = _ThreadState()


def saved_tensors(context: FunctionCtx) -> list[torch.Tensor]:
    """Return the tensors that an `autograd.Function` has passed to `save_for_backward` of its context."""
    return [tensor for tensor in getattr(context, "to_save", None) or () if tensor is not None]


def has_setup(function: type[Function]) -> bool:
    """Return True if an `autograd.Function` defines `setup_context`, so that its `forward` gets no context."""
    return function.setup_context is not Function.setup_context


def _intercepted_attribute(lookup: Lookup, function: type[Function], name: str) -> Any:
    """Return the attribute `name` of an `autograd.Function`, or a replacement if `apply` looks it up."""
    begun, is_set_up = _thread.begun, _thread.set_up is function
    # torch's own Functions run operators that the dispatcher sees, or compiled code.
    is_own = function.__module__.partition(".")[0] == "torch"
    if name == CONTEXT_CLASS and _WATCHERS.current() is not None and not is_own:
        return partial(ForwardCall(function, torch.is_grad_enabled()).create_context, lookup(function, name))
    if name == "forward" and begun is not None and begun.function is function:
        _thread.begun = None
        return begun.replace_forward(lookup)
    if name == "setup_context" and is_set_up:
        _thread.set_up = None
        return lambda *args: None  # `ForwardCall.run` has already run it
    return lookup(function, name)


_NAMES = {CONTEXT_CLASS, "forward", "setup_context"}


def _patch_lookups() -> Callable[[], None]:
    """Patch the lookup of attributes of `autograd.Function` classes. Return a function that removes the patch."""
    before = vars(FunctionMeta).get("__getattribute__")
    lookup: Lookup = FunctionMeta.__getattribute__

    def get_attribute(function: Any, name: str) -> Any:
        return _intercepted_attribute(lookup, function, name) if name in _NAMES else lookup(function, name)

    def undo() -> None:
        if before is None:
            del FunctionMeta.__getattribute__
        else:
            FunctionMeta.__getattribute__ = before  # type: ignore[method-assign]

    FunctionMeta.__getattribute__ = get_attribute  # type: ignore[method-assign]
    return undo


_WATCHERS = Watchers[Watcher](_patch_lookups)
begin_watching, end_watching = _WATCHERS.begin, _WATCHERS.end
