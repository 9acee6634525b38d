"""Programs of a block: the paths through its Python, each traced by Dynamo and checked by guards (rule R8).

Dynamo, torch.compile's front end, reads the Python of a call. It notes every attribute, closure, global, configuration
and mode that decides which operators run, and makes guards of them in C++. A `Program` is one such trace: calls that
pass its guards run the same operators. Sizes are symbols in the trace, so that one program serves all sizes that take
the same branches. Nothing is compiled, and no operator runs while a block is traced.

NOTE [What Dynamo's guards leave out]
1. Numbers that become inputs of the traced graph: whole numbers among the arguments, numpy's scalars. Their values are
   part of the key of a call (`Program.numbers`), and so are zeros, tuples with a list in them and the order of dicts.
2. Some of torch's settings (`settings_of_torch`), part of the key too.
3. Tensors that the path reaches by a way of its own, and that have a name in the block: a list of layers, a bound
   method. A program holds for the name that they had (`Program.fits`).
4. Methods, and what classes inherit or take over: a program compares what was looked up on classes, and the names in
   a `__dict__` that was read (`torch_glue/dynamo_gaps.py`).
5. Storage offsets, and which tensors share a storage. The key has those of the arguments; for what hangs on the block
   `ExecutionPlan.has_all` compares them.
6. Blocks that cannot be traced whole: data read into Python, code without source, a value that changes at every call.
   Their calls are told apart by `untraced_key`, and each call is compared with its tape, operator by operator
   (run/validation.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from adacc_hf.artifacts.files import note_latest
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

log = logging.getLogger(__name__)

MAX_PROGRAMS = 64
"""Programs kept for each class of blocks. The least recently used one is dropped."""
SHORT_LIFE = 16
"""Calls that a program has to serve to be worth its trace, which takes as long as some hundred checks of guards."""
MOST_SHORT_LIVES = 8
"""Short-lived programs in a row after which a block is not traced any more: its guards compare a value that changes at
every call, such as a counter."""
INERT_ARGUMENTS = frozenset({"num_items_in_batch"})
"""Arguments that Transformers passes through blocks to the loss. They differ at every step and change no operator."""


class Program:
    """One traced path through the Python of a class of blocks."""

    def __init__(self, guards: TracedGuards, scope: Scope) -> None:
        self.guards = guards
        self._aliases = _aliases(guards.tensors(scope), scope)
        """(place, name) of each parameter or buffer that the path reaches otherwise than by its name in the block."""
        self.number = next(_UNUSED)
        """The program's number, unique in this process."""

    def fits(self, scope: Scope) -> bool:
        """Return True if a call with these local variables takes this path."""
        if not self.guards.hold(scope):
            return False
        return not self._aliases or self._aliases == _aliases(self.guards.tensors(scope), scope)

    def numbers(self, scope: Scope) -> tuple[Hashable, ...]:
        """Return the numbers that are inputs of the program, for comparison by type and bits."""
        return tuple([n if type(n) is int else _exactly(n) for n in self.guards.numbers(scope)])


_UNUSED = count()


class _ClassPrograms:
    """The programs of one class of blocks."""

    def __init__(self) -> None:
        self.programs: OrderedDict[int, Program] = OrderedDict()
        """By number, the latest last."""


_OF_CLASSES: WeakKeyDictionary[type, _ClassPrograms] = WeakKeyDictionary()
"""By class of blocks, since blocks of one class share programs, in one model or in several. Guards decide."""


class Untraceable(OrderedDict[Hashable, str]):
    """Reason why a path cannot be traced, by class of block, `untraced_key` and `plain_arguments`; the latest last."""


class BlockPrograms:
    """Finds the program of each call of one block."""

    def __init__(self, block: nn.Module, untraceable: Untraceable | None = None) -> None:
        """`untraceable` is shared by the blocks of one model. The key of a path does not show everything that may have
        stopped its trace, so that another model of the same class must be traced again."""
        self._block = block
        self._untraceable = Untraceable() if untraceable is None else untraceable
        self._of_class = _OF_CLASSES.setdefault(type(block), _ClassPrograms())
        self._latest: Program | None = None
        self._num_calls = 0
        """Calls since the last trace."""
        self._num_short_lives = 0
        """Short-lived programs in a row."""
        self._why_given_up: str | None = None
        """The reason why the block is not traced any more; None while it is."""
        self._has_memory = not any(hasattr(parameter, "fake_mode") for parameter in block.parameters())
        self.untraced: str | None = None
        """The reason why the latest call has no program. None if it has one, or if the block's tensors have no memory
        (an estimate)."""

    def key(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Hashable, tuple[Hashable, ...]]:
        """Return the number of the program that a call runs, and the numbers that the program is given.

        If the call cannot be traced whole, return its `untraced_key` and `plain_arguments` in their place.
        """
        scope = scope_of(fn, args)
        self._num_calls += 1
        program = self._fitting(scope)
        if program is None:
            path = type(self._block), untraced_key(self._block), plain_arguments(scope)
            program = self._new_program(scope, path) if self._has_memory else None
            if program is None:
                return path[1:]
        self._latest, self.untraced = program, None
        return program.number, program.numbers(scope)

    def _fitting(self, scope: Scope) -> Program | None:
        """Return the traced program that a call runs, or None. Most often it is the latest one."""
        if self._latest is not None and self._latest.fits(scope):
            return self._latest
        programs = self._of_class.programs
        for program in reversed(programs.values()) if self._has_memory else ():
            if program.fits(scope):
                programs.move_to_end(program.number)
                return program
        return None

    def _new_program(self, scope: Scope, path: tuple[Hashable, ...]) -> Program | None:
        """Trace a call that no program fits. If that fails, return None and leave the reason in `untraced`."""
        self.untraced = self._why_given_up or self._untraceable.get(path)
        if self.untraced is not None:
            return None
        failed = self._latest
        self._num_short_lives = self._num_short_lives + 1 if failed is not None and self._num_calls <= SHORT_LIFE else 0
        self._num_calls = 0
        if failed is not None and self._num_short_lives >= MOST_SHORT_LIVES:
            self.untraced = self._why_given_up = f"{failed.guards.first_failure(scope)} changes again and again"
            return None
        try:
            program = Program(trace(scope, observing_hooks(self._block)), scope)
        except NotTraceableError as error:
            self.untraced = str(error)
            note_latest(self._untraceable, path, self.untraced, MAX_PROGRAMS)
            return None
        note_latest(self._of_class.programs, program.number, program, MAX_PROGRAMS)
        return program


def _aliases(tensors: tuple[Any, ...], scope: Scope) -> list[tuple[int, str]]:
    """Return (place among `tensors`, name) of each tensor on the storage of a parameter or buffer of the block."""
    if not tensors:
        return []
    block = scope["args"][0] if scope["args"] else None
    block = block if isinstance(block, nn.Module) else getattr(scope["call"], "__self__", None)
    if not isinstance(block, nn.Module):
        return []
    named = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    names = {storage_key(storage_of(tensor)): name for name, tensor in reversed(named)}
    keys = [storage_key(storage_of(tensor)) if isinstance(tensor, torch.Tensor) else None for tensor in tensors]
    return [(place, names[key]) for place, key in enumerate(keys) if key in names]


def settings_of_torch() -> tuple[Hashable, ...]:
    """Return those of torch's settings that no guard compares: hooks of all modules, what autocast casts to, and which
    kernels fused attention may take and prefers, which decides its operator."""
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
    """Return the local variables of a trace of `fn(*args)`. `fn` may be a partial, as Transformers passes it."""
    if isinstance(fn, partial):
        return {"call": fn.func, "args": (*fn.args, *args), "kwargs": fn.keywords}
    return {"call": fn, "args": args, "kwargs": {}}


def _exactly(number: Any) -> Hashable:
    if isinstance(number, np.ndarray | np.generic):
        return str(number.dtype), number.shape, number.tobytes()
    return type(number).__name__, repr(number)


# Blocks that cannot be traced whole.


def untraced_key(block: nn.Module) -> Hashable:
    """Return a key for the calls of a block that cannot be traced, from what is seen without running them.

    The key depends on autocast and on each module's name, class, hooks, mode, parameters and buffers, and on which
    parameters require gradients. It takes some microseconds a module, little beside comparing the call with its tape.
    """
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    # A hash is quick to look up. If two paths had the same one by chance, the comparison would tell.
    return hash((autocast, *[(path, *_described(module)) for path, module in block.named_modules()]))


def plain_arguments(scope: Scope) -> tuple[Hashable, ...]:
    """Return the numbers and strings among the arguments of a call, those in containers too."""
    named = [_plain(value) for name, value in scope["kwargs"].items() if name not in INERT_ARGUMENTS]
    return *[_plain(value) for value in scope["args"]], *named


def _described(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's class, mode, parameters, buffers and hooks for `untraced_key`.

    Class and hooks are given by name, since parametrize gives each module a class of its own.
    """
    hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
    trained = [(name, p is not None and p.requires_grad) for name, p in parameters_of(module).items()]
    return _name_of(type(module)), module.training, *trained, None, *buffers_of(module), None, *map(_name_of, hooks)


def _name_of(code: Any) -> str:
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}"


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _plain(item)) for name, item in value.items())
    return value if isinstance(value, (bool, int, float, str)) else None
