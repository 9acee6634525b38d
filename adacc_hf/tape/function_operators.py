"""An `autograd.Function` as one operator of a tape: the call, its arguments, and a second run of the forward.

The dispatcher does not see a kernel that a Function launches by address (Triton, ctypes), so the memory that the kernel
fills looks unwritten. But the Function itself is Python. The Function's `forward` fills the same memory again if
`forward` gets the same arguments and a context that only collects the saved tensors.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from inspect import unwrap
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.autograd.function import Function, FunctionCtx

from adacc_hf.tape.tape import geometry_of, leaves, map_tensors
from adacc_hf.torch_glue.function_calls import has_setup, saved_tensors
from adacc_hf.torch_glue.private import outer_hooks, storage_key
from adacc_hf.torch_glue.tensors import is_plain

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, Enum, np.generic)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CODE = (types.FunctionType, types.BuiltinFunctionType)
_DEPTH = 4
"""Maximum nesting depth of containers in the arguments of an `autograd.Function`."""


class NotReplayableError(Exception):
    """Error raised if an `autograd.Function` cannot be recorded as one operator of a tape. The message completes a
    sentence that begins with "the Function"."""


class FunctionCall(NamedTuple):
    """State at a call of an `autograd.Function` on which the forward may depend, and the call's non-tensor results."""

    identity: str
    """The class name, and a number that distinguishes living classes of the same name in this process."""
    requires_grad: tuple[bool, ...]
    """`requires_grad` of each tensor among the arguments, in order."""
    autocast: tuple[tuple[str, torch.dtype], ...]
    """(device type, dtype) of each device type under autocast."""
    results: Any
    """The forward's result, with None in place of each tensor in it."""


@dataclass(frozen=True)
class FunctionTarget:
    """Wrapper of an `autograd.Function` class that can be called as an operator on a tape. A call runs the forward, and
    returns the flattened results, followed by the tensors saved for backward."""

    function: type[Function]
    namespace: ClassVar[str] = "autograd_function"

    @property
    def __name__(self) -> str:
        return self.function.__name__

    @property
    def may_run_again(self) -> bool:
        """False for a module that runs in tiles, whose own backward runs its forward again."""
        return not is_one_operator(self.function)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.function.__module__}.{self.function.__qualname__}"

    def __call__(self, *args: Any, call: FunctionCall) -> tuple[Any, ...]:
        """Run the forward of the `autograd.Function` on `args`. If gradients are enabled, run `Function.apply`, which
        connects the results to the Function's backward."""
        with autocast_as(call.autocast):
            if torch.is_grad_enabled():
                return self._apply(args)
            arguments = _with_flags(args, call.requires_grad)
            context = _ReplayContext(self.function, arguments)
            if has_setup(self.function):
                result = self.function.forward(*arguments)
                self.function.setup_context(context, arguments, result)
            else:
                result = self.function.forward(context, *arguments)
        if getattr(context, "dirty_tensors", ()):
            raise NotReplayableError("marks arguments as dirty")
        return flatten_results(result, saved_tensors(context))

    def _apply(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run `Function.apply`. Return the flattened results, followed by the tensors saved for backward."""
        saved: list[torch.Tensor] = []
        pack, unpack = outer_hooks() or (torch.Tensor.detach, lambda tensor: tensor)

        def note(tensor: torch.Tensor) -> Any:
            saved.append(tensor)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            result = self.function.apply(*args)
        returned = flatten_results(result, saved)
        saved.clear()  # the graph references `note`; avoid a reference cycle through it
        return returned


def is_one_operator(function: type[Function]) -> bool:
    """Return True for a Function of this package that is always recorded as one operator (tape/tiled_rows.py), and
    that does not write into its arguments."""
    return bool(getattr(function, "is_one_operator", False))


def keeps_saved_tensors(function: type[Function]) -> bool:
    """Return True for a Function of this package whose backward does not write into saved tensors."""
    return bool(getattr(function, "keeps_saved_tensors", False))


class _ReplayContext(FunctionCtx):
    """Context (`ctx`) for a replayed forward of an `autograd.Function`. Collects the tensors that the forward saves."""

    output_grad_dtypes = None  # read by `set_output_grad_dtype` of torch 2.14

    def __init__(self, function: type[Function], args: tuple[Any, ...]) -> None:
        self._forward_cls = function
        self.needs_input_grad = tuple([isinstance(a, torch.Tensor) and a.requires_grad for a in args])


def flatten_results(result: Any, saved: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return the flattened results of an `autograd.Function`, followed by the tensors `saved` for its backward."""
    return (*leaves((result,)), *saved)


def results_of(result: Any) -> Any:
    """Return the result of an `autograd.Function` with None in place of each tensor. Raise NotReplayableError if the
    result contains an object that replay cannot return again."""
    check_argument(result)
    return map_tensors(result, torch.Tensor, lambda _: None)


# Arguments.


def check_argument(value: Any, depth: int = _DEPTH) -> None:
    """Raise NotReplayableError for an argument of an `autograd.Function` that a tape cannot hold: an object that is
    not made of numbers, strings and plain tensors, in containers that are nested at most `depth` levels deep."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not is_plain(value) or value.layout is not torch.strided:
            raise NotReplayableError(f"has an argument of type {kind.__name__}, which is not a plain tensor")
        return
    is_code = isinstance(value, _CODE) and not getattr(value, "__closure__", None)
    if is_code or isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH)):
        return
    is_dict = kind is dict and all(isinstance(key, (str, int)) for key in value)
    if not is_dict and kind not in (tuple, list, torch.Size) and not hasattr(value, "_fields"):
        raise NotReplayableError(f"has an argument of type {kind.__module__}.{kind.__qualname__}")
    if depth == 0:
        raise NotReplayableError(f"has arguments nested deeper than {_DEPTH} containers")
    for item in value.values() if is_dict else value:
        check_argument(item, depth - 1)


def _with_flags(args: tuple[Any, ...], requires_grad: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the arguments of an `autograd.Function` with detached tensors that have the recorded flags
    `requires_grad`."""
    flags = iter(requires_grad)
    flagged: tuple[Any, ...] = map_tensors(args, torch.Tensor, lambda t: t.detach().requires_grad_(next(flags)))
    return flagged


def on_copies(args: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """Return the arguments of an `autograd.Function` with tensors replaced by views of `copies`, by storage key."""

    def on_copy(tensor: torch.Tensor) -> torch.Tensor:
        copy = copies.get(storage_key(tensor.untyped_storage()))
        return tensor if copy is None else copy.as_strided(*geometry_of(tensor))

    return map_tensors(args, torch.Tensor, on_copy)


# The state around a call.

_DEVICE_TYPES = ("cpu", "cuda")


def call_of(function: type[Function], args: tuple[Any, ...]) -> FunctionCall:
    """Describe a call of the `autograd.Function` `function` that is about to run. Its results are not known yet."""
    flags = [leaf.requires_grad for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
    return FunctionCall(f"{FunctionTarget(function)}#{id(function)}", tuple(flags), autocast_of(), None)


def autocast_of() -> tuple[tuple[str, torch.dtype], ...]:
    """Return (device type, dtype) of each device type for which autocast is enabled."""
    return tuple([(d, torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES if torch.is_autocast_enabled(d)])


@contextmanager
def autocast_as(recorded: tuple[tuple[str, torch.dtype], ...]) -> Iterator[None]:
    """Enable autocast exactly for the pairs in `recorded` inside the `with` block, without its cache: a replay must not
    add casts to the cache."""
    dtypes = dict(recorded)
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES]
    had_cache = torch.is_autocast_cache_enabled()
    # `torch.autocast` would disable itself for the type of a missing device, such as that of fake tensors.
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)
    for device_type, _, dtype in before:
        torch.set_autocast_enabled(device_type, device_type in dtypes)
        torch.set_autocast_dtype(device_type, dtypes.get(device_type, dtype))
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(had_cache)
        for device_type, was_enabled, dtype in before:
            torch.set_autocast_enabled(device_type, was_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


# Globals, closures and class attributes that a forward reads.

_MOST_CODE = 64
"""Maximum number of Python functions that are searched for globals and closures."""


class Surroundings:
    """Snapshot of the Python values that the forward of an `autograd.Function` can reach by name. If the forward
    changes one of them, a replay could give a different result."""

    def __init__(self, function: type[Function]) -> None:
        self.has_tensors = False
        """True if the forward can reach a tensor."""
        self._values: list[tuple[str, Any]] = []
        self._searched_code: set[int] = set()
        for base in function.__mro__:
            if base.__module__.partition(".")[0] != "torch":
                for name, value in vars(base).items():
                    self._note(name, value)
        for code in (function.forward, function.setup_context):
            self._search_code(code)

    def changed(self, later: Surroundings) -> str | None:
        """Return the name of a value that differs in the snapshot `later`, or None if all values are equal."""
        pairs = zip(self._values, later._values, strict=False)
        return next((value[0] for value, later_value in pairs if value != later_value), None)

    def _search_code(self, code: Any) -> None:
        """Record the values of all globals and closure variables that a Python function uses."""
        code = unwrap(code) if callable(code) else code
        if (
            not isinstance(code, types.FunctionType)
            or id(code) in self._searched_code
            or len(self._searched_code) >= _MOST_CODE
        ):
            return
        if code.__module__ and code.__module__.partition(".")[0] in ("torch", "triton", "numpy"):
            return
        self._searched_code.add(id(code))
        for cell, name in zip(code.__closure__ or (), code.__code__.co_freevars, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._note(name, value)
        for name in code.__code__.co_names:
            if name in code.__globals__:
                self._note(name, code.__globals__[name])

    def _note(self, name: str, value: Any) -> None:
        """Record `value`, which the forward can reach through the variable `name`."""
        if isinstance(value, torch.Tensor):
            self.has_tensors = True
        elif isinstance(value, (bool, int, float, str, type(None))):
            self._values.append((name, value))
        elif isinstance(value, (list, dict, set)):  # such as a cache or a log
            self._values.append((name, len(value)))
        elif isinstance(value, types.FunctionType):
            self._search_code(value)
