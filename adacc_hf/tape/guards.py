"""Guards: what a call of a block depends on, found by tracing the block's Python with Dynamo (rule R8).

torch.compile's front end reads the Python of a call, notes every attribute, closure, global, configuration and mode
that decides which operators run, and makes guards of them in C++. A `Program` is one such trace. Calls that pass its
guards run the same operators. Sizes are symbols in it, so that one program serves all sizes that take the same
branches. Nothing is compiled, and no operator runs while a block is traced.

NOTE [What Dynamo's guards leave out]
1. Numbers that become inputs of the traced graph: whole numbers among the arguments, numpy's scalars. Their values are
   part of the key of a call (`Program.numbers`), and so are zeros, tuples with a list in them and the order of dicts.
2. Some of torch's settings (`settings_of_torch`), part of the key too.
3. Tensors that the path reaches by a way of its own, and that have a name in the block: a list of layers, a bound
   method. A program holds for the name that they had (`Program.fits`).
4. Methods, and what classes inherit or take over: a program compares what was looked up on classes, and the names in
   a `__dict__` that was read (`torch_glue/dynamo_gaps.py`).
5. Storage offsets, and which tensors share a storage. The key has those of the arguments; for what hangs on the block
   `CompiledPlan.has_all` compares them.
6. Blocks that cannot be traced whole: data read into Python, code without source, a value that changes at every call.
   Their calls are told apart by `untraced_key`, and each call is compared with its tape, operator by operator
   (run/validation.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import chain, count
from operator import methodcaller
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
    OPERATES,
    attention_priority,
    buffers_of,
    forward_hooks,
    forward_pre_hooks,
    modules_of,
    parameters_of,
    storage_key,
)
from adacc_hf.torch_glue.tensors import storage_of

log = logging.getLogger(__name__)

MAX_PROGRAMS = 64
"""Programs kept for each class of blocks; the least recently used one goes."""
SHORT_LIFE = 16
"""Calls under a program below which a trace was not worth its time: tracing takes as long as some hundred checks."""
RESTLESS_AFTER = 8
"""Programs of a short life, one after the other, after which a block is traced no more: what its guards compare changes
at every call, as a counter does."""
INERT_ARGUMENTS = frozenset({"num_items_in_batch"})
"""Arguments that Transformers passes through blocks to the loss; they differ at every step and change nothing here."""
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")


class Program:
    """One traced path through the Python of a class of blocks."""

    def __init__(self, guards: TracedGuards, scope: Scope) -> None:
        self._guards = guards
        self._aliases = [] if guards.tensors is None else _aliases(guards.tensors(scope), scope)
        """(place, name) of tensors that the path reaches otherwise than by a name that they have in the block."""
        self.number = next(_UNUSED)
        """The program's number, unique in this process."""

    def fits(self, scope: Scope) -> bool:
        """Return True if a call with these local variables runs this program."""
        return self._guards.is_alive and self._guards.hold(scope) and not (self._aliases and self._have_moved(scope))

    def _have_moved(self, scope: Scope) -> bool:
        """Return True if a tensor that the path reaches in another way has another name in the block by now."""
        assert self._guards.tensors is not None  # some of them have names
        return _aliases(self._guards.tensors(scope), scope) != self._aliases

    def numbers(self, scope: Scope) -> tuple[Hashable, ...]:
        """Return the numbers that are inputs of the program: whole numbers as they are, others so that equal means
        equal in type and bits."""
        return tuple([n if type(n) is int else _exactly(n) for n in self._guards.numbers(scope)])

    def first_failure(self, scope: Scope) -> str:
        """Return the first guard that a call fails, as text."""
        return self._guards.first_failure(scope)


_UNUSED = count()


class _Known:
    """What is known of one class of blocks: its programs, and the paths that cannot be traced."""

    def __init__(self) -> None:
        self.programs: OrderedDict[int, Program] = OrderedDict()
        """By number, the latest last."""
        self.refused: OrderedDict[Hashable, str] = OrderedDict()
        """Why a path cannot be traced, by `untraced_key`."""


_KNOWN: WeakKeyDictionary[type, _Known] = WeakKeyDictionary()
"""By class of blocks: blocks of one class, in one model or in several, share their programs where the guards hold."""


class BlockPrograms:
    """Finds the program of each call of one block."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._known = _KNOWN.setdefault(type(block), _Known())
        self._paths = StatePaths(block)
        self._latest: Program | None = None
        self._num_calls = 0
        self._num_short = 0
        self._restless: str | None = None
        """Why the block is traced no more; None while it is."""
        self._has_memory = not any(hasattr(parameter, "fake_mode") for parameter in block.parameters())
        self.untraced: str | None = None
        """Why the latest call has no program; None if it has one, or if the block's tensors have no memory."""

    def key(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Hashable, tuple[Hashable, ...]]:
        """Return what tells the program of a call from others, and the numbers that it is given.

        The number of the program and `Program.numbers`; `untraced_key` and `plain_arguments` if the call cannot be
        traced whole.
        """
        scope = scope_of(fn, args)
        latest = self._latest
        self._num_calls += 1
        if latest is not None and latest.fits(scope):
            self.untraced = None
            return latest.number, latest.numbers(scope)
        program = self._find(scope) if self._has_memory else None
        if program is None:
            return untraced_key(self._current_paths()), plain_arguments(scope)
        self._latest = program
        return program.number, program.numbers(scope)

    def _find(self, scope: Scope) -> Program | None:
        programs = self._known.programs
        for program in reversed(programs.values()):
            if program.fits(scope):
                programs.move_to_end(program.number)
                self.untraced = None
                return program
        if self._restless is not None:
            self.untraced = self._restless
            return None
        return self._traced(scope)

    def _traced(self, scope: Scope) -> Program | None:
        path = untraced_key(self._current_paths()), plain_arguments(scope)
        refused = self._known.refused.get(path)
        if refused is not None:
            self.untraced = refused
            return None
        failed = self._latest
        self._num_short = self._num_short + 1 if failed is not None and self._num_calls <= SHORT_LIFE else 0
        self._num_calls = 0
        if failed is not None and self._num_short >= RESTLESS_AFTER:
            self.untraced = self._restless = f"{failed.first_failure(scope)} changes again and again"
            return None
        try:
            program = Program(trace(scope, observing_hooks(self._block)), scope)
        except NotTraceableError as error:
            self.untraced = str(error)
            note_latest(self._known.refused, path, self.untraced, MAX_PROGRAMS)
            return None
        self.untraced = None
        note_latest(self._known.programs, program.number, program, MAX_PROGRAMS)
        return program

    def _current_paths(self) -> StatePaths:
        if not self._paths.are_current():
            self._paths = StatePaths(self._block)
        return self._paths


def _aliases(tensors: tuple[Any, ...], scope: Scope) -> list[tuple[int, str]]:
    """Return (place, name in the block) of those of `tensors` that share a storage with a parameter or buffer."""
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
    """Return the local variables that a trace of `fn(*args)` has; `fn` may be a partial, as Transformers makes it."""
    if isinstance(fn, partial):
        return {"call": fn.func, "args": (*fn.args, *args), "kwargs": fn.keywords}
    return {"call": fn, "args": args, "kwargs": {}}


def _exactly(number: Any) -> Hashable:
    if isinstance(number, np.ndarray | np.generic):
        return str(number.dtype), number.shape, number.tobytes()
    return type(number).__name__, repr(number)


# Blocks that cannot be traced whole.


class StatePaths:
    """The modules of a block with their parameters, buffers and hooks, for noticing at each call that these changed.

    Adapters, pruning and parametrizations put others in their places.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = dict(block.named_modules())
        registers = [parameters_of(module) for module in modules.values()]
        self._parameters = [(each, name) for each in registers for name, given in each.items() if given is not None]
        self._registers = [vars(module)[name] for module in modules.values() for name in OPERATES]
        self._filled = [register for register in self._registers if register]  # most are empty, and counted only
        self._children = [modules_of(module) for module in modules.values() if modules_of(module)]
        self._modules = list(modules.values())
        self._before = self._content()
        self.structure = hash(tuple((path, *_made_of(module)) for path, module in modules.items()))
        """Equal for blocks of the same modules, with the same names and hooks."""

    def are_current(self) -> bool:
        """Return True if the block has the same modules as before, with the same parameters, buffers and hooks."""
        return self._content() == self._before

    def _content(self) -> tuple[list[int], list[str | int], list[nn.Module | None]]:
        names, modules = map(_KEYS, self._filled), map(_VALUES, self._children)
        return list(map(len, self._registers)), list(chain.from_iterable(names)), list(chain.from_iterable(modules))

    def modes(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return which parameters want gradients and which modules train, while these paths are current."""
        wanted = tuple([register[name].requires_grad for register, name in self._parameters])
        return wanted, tuple([module.training for module in self._modules])


def untraced_key(paths: StatePaths) -> Hashable:
    """Return what tells calls of a block apart that cannot be traced, as far as it can be told without running it.

    Autocast, the block's modules and hooks, which of its parameters want gradients and which of its modules train.
    """
    autocast = tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda")
    )
    return autocast, paths.structure, paths.modes()


def plain_arguments(scope: Scope) -> tuple[Hashable, ...]:
    """Return the numbers and names among the arguments of a call, containers searched."""
    named = [_plain(value) for name, value in scope["kwargs"].items() if name not in INERT_ARGUMENTS]
    return *[_plain(value) for value in scope["args"]], *named


def _made_of(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's class, names and hooks, all by name: parametrize makes each module a class of its own."""
    hooks = [*forward_pre_hooks(module).values(), *forward_hooks(module).values()]
    names = [*parameters_of(module), None, *buffers_of(module), None, *map(_name_of, hooks)]
    return _name_of(type(module)), tuple(names)


def _name_of(code: Any) -> str:
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}"


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _plain(item)) for name, item in value.items())
    return value if isinstance(value, (bool, int, float, str)) else None
