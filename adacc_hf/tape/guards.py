"""Traced paths of a block: paths through the block's Python code, traced by Dynamo and checked by guards.

A call may run on a tape only if there is evidence that the call runs the tape's operators (rule R8). The guards are the
usual evidence.

Dynamo, torch.compile's front end, reads the Python code of a call, notes every attribute, closure, global,
configuration and mode that decides which operators run, and creates guards for them in C++. A `TracedPath` is one
trace: calls that pass its guards run the same operators. Sizes are symbols in the trace, so one traced path serves all
sizes that take the same branches. Nothing is compiled, and no operator runs while a block is traced.

NOTE [What Dynamo's guards leave out]
1. Numbers that become inputs of the traced graph: integers among the arguments, numpy scalars. The values of these
   numbers are part of a call's key (`TracedPath.numbers`). The key also contains the signs of zeros, the positions of
   lists inside tuples among the arguments, and the order of dicts.
2. Some of torch's settings (`settings_of_torch`), which are part of the key too.
3. Tensors of the block that the code reaches by other objects than the block's attributes, such as a list of layers or
   a bound method. A traced path contains the names of these tensors in the block, and is valid only for calls in which
   they have the same names (`TracedPath.fits`).
4. Methods, and attributes that classes inherit: a traced path compares the attributes that the trace looked up on
   classes, and the names in a `__dict__` that the trace read (`torch_glue/dynamo.py`).
5. Storage offsets, and which tensors share a storage. The key contains the offsets and the sharing of the arguments.
   `ExecutionPlan.fetch` compares the offsets and the sharing of the block's own tensors.
6. Blocks that cannot be traced completely: data read into Python, code without source, a value that changes at every
   call. `untraced_key` distinguishes the calls of these blocks, and each call is validated against its tape, operator
   by operator (run/validation.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import nn

from adacc_hf.artifacts.files import put_latest
from adacc_hf.torch_glue.compat import observing_hooks
from adacc_hf.torch_glue.dynamo import NotTraceableError, Scope, TracedGuards, trace
from adacc_hf.torch_glue.private import (
    GLOBAL_HOOKS,
    GLOBAL_PRE_HOOKS,
    attention_priority,
    buffers_of,
    forward_hooks,
    forward_pre_hooks,
    parameters_of,
    storage_key,
)
from adacc_hf.torch_glue.tensors import storage_of

MAX_PATHS = 64
"""Maximum number of traced paths cached for each Python class of blocks. A traced path is Dynamo's trace of one path
through the block's code. The least recently used path is dropped."""
SHORT_LIFE = 16
"""Maximum number of calls between two traces for the earlier trace to count as short-lived. Tracing takes as long as
about a hundred checks of guards."""
MOST_SHORT_LIVES = 8
"""Number of consecutive short-lived traces after which a block is not traced any more. The guards of such a block
compare a value that changes at every call, such as a counter."""
INERT_ARGUMENTS = frozenset({"num_items_in_batch"})
"""Keyword arguments that Transformers passes through blocks to the loss. Their values differ at every step, and no
operator of a block depends on them."""


class TracedPath:
    """One path through the Python code of a block's class, traced by Dynamo, with guards that check if a call takes
    this path."""

    def __init__(self, guards: TracedGuards, scope: Scope) -> None:
        self.guards = guards
        self._aliases = _aliased_arguments(guards.tensors(scope), scope)
        """(index among the guards' tensors, name) of each parameter or buffer that the block's code does not reach by
        its name."""
        self.number = next(_UNUSED)
        """Number of the path, unique in this process."""

    def fits(self, scope: Scope) -> bool:
        """Return True if a call with the local variables `scope` takes this path."""
        if not self.guards.hold(scope):
            return False
        return not self._aliases or self._aliases == _aliased_arguments(self.guards.tensors(scope), scope)

    def numbers(self, scope: Scope) -> tuple[Hashable, ...]:
        """Return the numbers in a call that are inputs of the traced graph, as hashable keys.

        `scope` contains the call's local variables. Two keys differ if the numbers differ in type or bits.
        """
        return tuple([n if type(n) is int else _exact_number(n) for n in self.guards.numbers(scope)])


_UNUSED = count()


class _ClassPaths:
    """Traced paths through the code of all blocks of one Python class."""

    def __init__(self) -> None:
        self.paths: OrderedDict[int, TracedPath] = OrderedDict()


_OF_CLASSES: WeakKeyDictionary[type, _ClassPaths] = WeakKeyDictionary()
"""Traced paths by the blocks' Python class. All blocks of a class share paths, also across models. The guards tell
which path a call takes."""


class Untraceable(OrderedDict[Hashable, str]):
    """Table of the calls that Dynamo cannot trace: from (block class, (`untraced_key`, `plain_arguments`)) to the
    reason.

    The latest call is last.
    """


class BlockPaths:
    """Traced paths through the code of one block. Finds or traces the path of each call."""

    def __init__(self, block: nn.Module, untraceable: Untraceable | None = None) -> None:
        """Initialize for `block`. The blocks of one model share `untraceable`, the table of calls that could not be
        traced.

        Each model has a separate table, because the keys of the table do not contain everything that can stop a trace.
        """
        # A weak reference, because tables of paths may have blocks as weak keys.
        self._block_reference = ref(block)
        self._untraceable = Untraceable() if untraceable is None else untraceable
        self._of_class = _OF_CLASSES.setdefault(type(block), _ClassPaths())
        self._latest: TracedPath | None = None
        self._num_calls = 0
        self._num_short_lives = 0
        """Number of consecutive traces that were used for few calls (`SHORT_LIFE`)."""
        self._stop_reason: str | None = None
        """The reason why the block is not traced any more, or None."""
        self._has_memory = not any(hasattr(parameter, "fake_mode") for parameter in block.parameters())
        self.untraced: str | None = None
        """The reason why Dynamo could not trace the latest call. None if the call takes a path that was traced, or if
        the block's tensors are fake (in an estimate)."""

    @property
    def _block(self) -> nn.Module:
        block = self._block_reference()
        assert block is not None  # the caller runs the block
        return block

    def key(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Hashable, tuple[Hashable, ...]]:
        """Return (number of the path through the block's code that the call `fn(*args)` takes, input numbers of the
        traced graph).

        Dynamo traces each path once. If the call cannot be traced completely, return (`untraced_key`,
        `plain_arguments`) instead.
        """
        scope = scope_of(fn, args)
        self._num_calls += 1
        path = self._find_path(scope)
        if path is None:
            untraced_call = untraced_key(self._block), plain_arguments(scope)
            path = self._trace_path(scope, untraced_call) if self._has_memory else None
            if path is None:
                return untraced_call
        self._latest, self.untraced = path, None
        return path.number, path.numbers(scope)

    def _find_path(self, scope: Scope) -> TracedPath | None:
        """Return a path, traced for an earlier call, whose guards accept the call in `scope`. Return None if no path
        does.

        The path of the latest call is tried first.
        """
        if self._latest is not None and self._latest.fits(scope):
            return self._latest
        paths = self._of_class.paths
        for path in reversed(paths.values()) if self._has_memory else ():
            if path.fits(scope):
                paths.move_to_end(path.number)
                return path
        return None

    def _trace_path(self, scope: Scope, untraced_call: Hashable) -> TracedPath | None:
        """Trace a call that takes no path traced so far. If the trace fails, return None and set `untraced` to the
        reason."""
        self.untraced = self._stop_reason or self._untraceable.get((type(self._block), untraced_call))
        if self.untraced is not None:
            return None
        previous = self._latest
        self._num_short_lives = (
            self._num_short_lives + 1 if previous is not None and self._num_calls <= SHORT_LIFE else 0
        )
        self._num_calls = 0
        if previous is not None and self._num_short_lives >= MOST_SHORT_LIVES:
            self.untraced = self._stop_reason = f"{previous.guards.first_failure(scope)} changes again and again"
            return None
        try:
            path = TracedPath(trace(scope, observing_hooks(self._block)), scope)
        except NotTraceableError as error:
            self.untraced = str(error)
            put_latest(self._untraceable, (type(self._block), untraced_call), self.untraced, MAX_PATHS)
            return None
        put_latest(self._of_class.paths, path.number, path, MAX_PATHS)
        return path


def _aliased_arguments(tensors: tuple[Any, ...], scope: Scope) -> list[tuple[int, str]]:
    """Return (index in `tensors`, name of the parameter or buffer) of each tensor that shares a storage with a
    parameter or buffer of the block."""
    if not tensors:
        return []
    block = scope["args"][0] if scope["args"] else None
    block = block if isinstance(block, nn.Module) else getattr(scope["call"], "__self__", None)
    if not isinstance(block, nn.Module):
        return []
    named_tensors = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    names = {storage_key(storage_of(tensor)): name for name, tensor in reversed(named_tensors)}
    keys = [storage_key(storage_of(tensor)) if isinstance(tensor, torch.Tensor) else None for tensor in tensors]
    return [(index, names[key]) for index, key in enumerate(keys) if key in names]


def settings_of_torch() -> tuple[Hashable, ...]:
    """Return settings of torch on which a block's operators depend, but which Dynamo's guards do not compare.

    The settings are global module hooks, autocast's dtypes, and the enabled and preferred kernels of fused attention.
    """
    flags = torch.backends.cuda
    return (
        *GLOBAL_PRE_HOOKS,
        None,
        *GLOBAL_HOOKS,
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        flags.flash_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
        flags.cudnn_sdp_enabled(),
        *attention_priority(),
    )


def scope_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Scope:
    """Return the local variables with which Dynamo traces the call `fn(*args)`. `fn` may be a `functools.partial`."""
    if isinstance(fn, partial):
        return {"call": fn.func, "args": (*fn.args, *args), "kwargs": fn.keywords}
    return {"call": fn, "args": args, "kwargs": {}}


def _exact_number(number: Any) -> Hashable:
    if isinstance(number, np.ndarray | np.generic):
        return str(number.dtype), number.shape, number.tobytes()
    return type(number).__name__, repr(number)


# Blocks that cannot be traced completely.


def untraced_key(block: nn.Module) -> Hashable:
    """Return a key of `block` for a call that Dynamo cannot trace.

    This key is a part of the call's key (`CallKey`), in place of the number of a traced path (`TracedPath.number`).

    The key depends on autocast and on each module's name, class, hooks, mode, parameters and buffers, and on which
    parameters require gradients. Computing the key takes a few microseconds per module, little compared with validating
    the call.
    """
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    # A hash is fast to look up. The validation would detect a collision.
    return hash((autocast, *[(path, *_module_description(module)) for path, module in block.named_modules()]))


def plain_arguments(scope: Scope) -> tuple[Hashable, ...]:
    """Return a call's arguments with tensors and other objects replaced by None. Numbers, strings and containers
    stay."""
    named = [_plain_arguments(value) for name, value in scope["kwargs"].items() if name not in INERT_ARGUMENTS]
    return *[_plain_arguments(value) for value in scope["args"]], *named


def _module_description(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's class, mode, parameters, buffers and hooks, to be part of an `untraced_key`.

    Class and hooks are represented by name, because parametrize creates a new class for each module.
    """
    hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
    trainable = [(name, p is not None and p.requires_grad) for name, p in parameters_of(module).items()]
    return (
        _code_name(type(module)),
        module.training,
        *trainable,
        None,
        *buffers_of(module),
        None,
        *map(_code_name, hooks),
    )


def _code_name(code: Any) -> str:
    named_object = code if hasattr(code, "__qualname__") else type(code)
    return f"{named_object.__module__}.{named_object.__qualname__}"


def _plain_arguments(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain_arguments(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _plain_arguments(item)) for name, item in value.items())
    return value if isinstance(value, (bool, int, float, str)) else None
