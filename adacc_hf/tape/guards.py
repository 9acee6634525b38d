"""Keys of a block's calls, and traced paths: paths through the block's Python code, traced and checked by Dynamo.

An equal key is the evidence that a call runs the operators of a tape (rule R8).

Dynamo, torch.compile's front end, reads the Python code of a call, notes every attribute, closure, global,
configuration and mode that decides which operators run, and creates guards for them in C++. A `TracedPath` is one
trace: calls that pass its guards run the same operators. Sizes are symbols in the trace, so one traced path serves all
sizes that take the same branches. Nothing is compiled, and no operator runs while a block is traced.

NOTE [What Dynamo's guards leave out]
1. Numbers that become inputs of the traced graph: integers among the arguments, numpy scalars. The values of these
   numbers are part of a call's key (`TracedPath.numbers`). A traced path compares the signs of zeros, the positions of
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
   call. They run plainly or under torch's checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.autograd.function import Function

from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.tape.graph_operators import graph_operators, operators_of
from adacc_hf.tape.inputs import Args, Kwargs, argument_layout, block_layout
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.compat import observing_hooks
from adacc_hf.torch_glue.dynamo import GUARDS_PARAMETERS, NotTraceableError, Scope, TracedGuards, trace
from adacc_hf.torch_glue.private import GLOBAL_HOOKS, GLOBAL_PRE_HOOKS, attention_priority, storage_key
from adacc_hf.torch_glue.tensors import storage_of

MAX_PATHS = 64
"""Maximum number of traced paths cached for each Python class of blocks, least recently used goes first."""
SHORT_LIFE = 16
"""Maximum number of calls between two traces for the earlier trace to count as short-lived. Tracing takes as long as
about a hundred checks of guards."""
FEW_SHORT_LIVES, MOST_SHORT_LIVES = 2, 8
"""Number of consecutive short-lived traces after which integers of a block become inputs of the graph, because one may
be a counter; and after which the block is not traced any more, because its guards compare another value that changes at
every call."""
INERT_ARGUMENTS = frozenset({"num_items_in_batch"})
"""Keyword arguments that Transformers passes through blocks to the loss. They differ at every step."""


class TracedPath:
    """One path through the Python code of a block's class, with guards that check if a call takes it."""

    def __init__(self, guards: TracedGuards, scope: Scope) -> None:
        self.guards = guards
        self._aliases = _aliased_arguments(guards.tensors(scope), scope)
        """(index among the guards' tensors, name) of each parameter or buffer that code does not reach by its name."""
        self.number = next(_UNUSED)
        """Number of the path, unique in this process."""
        self.is_witness: dict[str, bool] = {}
        """For each `Tape.structure` that was recorded on this path: True if the path's graph has exactly its operators,
        and so tells the operators at other sizes too."""

    def fits(self, scope: Scope) -> bool:
        """Return True if a call with the local variables `scope` takes this path."""
        if not self.guards.hold(scope):
            return False
        return not self._aliases or self._aliases == _aliased_arguments(self.guards.tensors(scope), scope)

    def graph_of(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> GraphWithInputs:
        """Return (traced graph, its inputs) of a call `fn(*args)` that takes this path."""
        return self.guards.graph, self.guards.inputs(scope_of(fn, args))

    def numbers(self, scope: Scope) -> tuple[Hashable, ...]:
        """Return the numbers in a call that are inputs of the traced graph, as keys of their type and bits."""
        return tuple([n if type(n) is int else _exact_number(n) for n in self.guards.numbers(scope)])


_UNUSED = count()


class _ClassPaths:
    """Traced paths through the code of all blocks of one Python class."""

    def __init__(self) -> None:
        self.paths: OrderedDict[int, TracedPath] = OrderedDict()
        self.has_counters = False
        """True if integers of the block are inputs of graphs, because one may change at every call."""
        self.opaque: dict[type[Function], Any] = {}
        """What `autograd.Function`s that Dynamo cannot trace returned (`dynamo_gaps.describe_results`)."""


_OF_CLASSES: WeakKeyDictionary[type, _ClassPaths] = WeakKeyDictionary()
"""Traced paths by the blocks' Python class. All blocks of a class share paths, also across models."""


Untraceable = OrderedDict[Hashable, str]
"""Table of the calls that Dynamo cannot trace: from (block class, mode, `plain_arguments`) to the reason."""

GraphWithInputs = tuple[Callable[..., Any], tuple[Any, ...]]
"""(traced graph of a call, its inputs)."""
GraphOfCall = Callable[[Callable[..., Any], tuple[Any, ...]], GraphWithInputs]
"""Function from (fn, args) of a block's call to (traced graph, its inputs)."""


def _graph_function(path: TracedPath | None) -> GraphOfCall | None:
    is_known = path is not None and path.is_witness and all(path.is_witness.values())
    return path.graph_of if path is not None and is_known else None


def _graph_has(path: TracedPath, tape: Tape, fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return True if the graph of `path`, run on fakes of the inputs of a call, has the operators of `tape`."""
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # a graph may fail between switches of the mode
            return graph_operators(*path.graph_of(fn, args)) == operators_of(tape)
    except Exception:  # a tensor class or operator has no fakes
        return False


class BlockPaths:
    """Traced paths through the code of one block. Finds or traces the path of each call.

    The blocks of one model share `untraceable`, the table of calls that could not be traced. Each model has a separate
    table, because the keys of the table do not contain everything that can stop a trace.
    """

    def __init__(self, untraceable: Untraceable | None = None) -> None:
        self._untraceable: Untraceable = OrderedDict() if untraceable is None else untraceable
        self._of_class = _ClassPaths()
        self._latest: TracedPath | None = None
        self._num_calls = 0
        self._num_short_lives = 0
        """Number of consecutive traces that were used for few calls (`SHORT_LIFE`)."""
        self._stop_reason: str | None = None
        """The reason why the block is not traced any more, or None."""
        self._has_memory: bool | None = None
        """False for a block of fake tensors (in an estimate), which is not traced. None before the first call."""
        self.untraced: str | None = None
        """The reason why Dynamo could not trace the latest call. None if the call takes a path that was traced."""

    def _start(self, block: nn.Module) -> bool:
        """Set the attributes that depend on the block at its first call. Return False for a block of fake tensors."""
        if self._has_memory is None:
            self._of_class = _OF_CLASSES.setdefault(type(block), self._of_class)
            self._has_memory = not any(hasattr(parameter, "fake_mode") for parameter in block.parameters())
        return self._has_memory

    def key(
        self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Hashable, tuple[Hashable, ...]] | None:
        """Return (number of the path through the block's code that the call `fn(*args)` takes, input numbers of the
        traced graph).

        Dynamo traces each path once. Return None, and set `untraced`, if it cannot trace the call.
        """
        scope = scope_of(fn, args)
        if not self._start(block):
            return "fake", plain_arguments(scope)
        self._num_calls += 1
        path = self._find_path(scope) or self._trace_path(block, scope)
        if path is None:
            return None
        self._latest, self.untraced = path, None
        return path.number, path.numbers(scope)

    def leave_out(self, functions: Mapping[type[Function], Any]) -> bool:
        """Note what `autograd.Function`s returned in a call that Dynamo could not trace. Return True if this is new: a
        trace which leaves them out may succeed."""
        if self._stop_reason is not None or functions.keys() <= self._of_class.opaque.keys():
            return False
        self._of_class.opaque |= functions
        self._untraceable.clear()
        return True

    @property
    def is_partial(self) -> bool:
        """True if the latest call runs code that no guard covers."""
        return self._latest is not None and self._latest.guards.is_partial

    def compare_graph(self, tape: Tape, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Compare the graph of the latest call, `fn(*args)`, with `tape`, which was recorded in this call."""
        path = self._latest
        if path is not None and path.is_witness.get(tape.structure) is None and tape.untrusted is None:
            path.is_witness[tape.structure] = _graph_has(path, tape, fn, args)

    def has_graph_of(self, tape: Tape) -> bool:
        """Return True if the graph of the latest call has exactly the operators of `tape`, by `compare_graph`."""
        return self._latest is not None and self._latest.is_witness.get(tape.structure, False)

    def has_graph(self) -> bool:
        """Return True if some call on the path of the latest call had exactly the operators of its graph."""
        return self._latest is not None and any(self._latest.is_witness.values())

    def has_other_numbers(self, tape: Tape, fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Return True if the graph of the latest call, `fn(*args)`, shows that `tape` is wrong for the call's sizes."""
        path = self._latest
        return path is not None and self.has_graph_of(tape) and not _graph_has(path, tape, fn, args)

    def graph_of(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> GraphWithInputs | None:
        """Return (graph, its inputs) of the latest call, `fn(*args)`. The graph may have somewhat other operators than
        the call."""
        return None if self._latest is None else self._latest.graph_of(fn, args)

    def graph_function(self) -> GraphOfCall | None:
        """Return a function from (fn, args) to (traced graph, inputs). None if a call's operators were others."""
        return _graph_function(self._latest)

    def find_graph(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...]) -> GraphOfCall | None:
        """Return `graph_function` of a call `fn(*args)` that was not passed to `key`. Dynamo traces nothing."""
        return _graph_function(self._find_path(scope_of(fn, args)) if self._start(block) else None)

    def _find_path(self, scope: Scope) -> TracedPath | None:
        """Return a path traced for an earlier call whose guards accept the call in `scope`, or None."""
        if self._latest is not None and self._latest.fits(scope):
            return self._latest
        paths = self._of_class.paths
        for path in reversed(paths.values()):
            if path.fits(scope):
                paths.move_to_end(path.number)
                return path
        return None

    def _trace_path(self, block: nn.Module, scope: Scope) -> TracedPath | None:
        """Trace a call that takes a new path. If the trace fails, return None and set `untraced` to the reason."""
        call = type(block), block.training, plain_arguments(scope)
        self.untraced = self._stop_reason or self._untraceable.get(call)
        if self.untraced is not None:
            return None
        previous = self._latest
        is_short = previous is not None and self._num_calls <= SHORT_LIFE
        self._num_short_lives = self._num_short_lives + 1 if is_short else 0
        self._of_class.has_counters |= self._num_short_lives >= FEW_SHORT_LIVES
        self._num_calls = 0
        if previous is not None and self._num_short_lives >= MOST_SHORT_LIVES:
            self.untraced = self._stop_reason = f"{previous.guards.first_failure(scope)} changes again and again"
            return None
        try:
            of_class, observing = self._of_class, observing_hooks(block)
            guards = trace(scope, observing, of_class.opaque, has_counters=of_class.has_counters)
            path = TracedPath(guards, scope)
        except NotTraceableError as error:
            self.untraced = str(error)
            put_latest(self._untraceable, call, self.untraced, MAX_PATHS)
            return None
        put_latest(self._of_class.paths, path.number, path, MAX_PATHS)
        return path


class CallKey(NamedTuple):
    """Key of a block's call. Two calls with equal keys, of blocks of one kind, run the same operators."""

    shape: Hashable
    """(layout of the tensor arguments, input numbers of the traced path, number of the path, settings of torch, name of
    the module that runs in tiles). A traced path is Dynamo's trace of one path through the block's code."""
    layout: int
    """Hash of the layout of the block's own tensors (`block_layout`). In addition, each execution plan compares the
    layout of the tensors that replay reads (`ExecutionPlan.fetch`)."""


class KnownShapes(OrderedDict[CallKey, Tape]):
    """Table from a block's call keys to tapes. The latest key is last. All plans of a block share one table."""

    def __init__(self, untraceable: Untraceable | None = None) -> None:
        super().__init__()
        self.paths = BlockPaths(untraceable)
        """Dynamo's traces of the block's code."""
        self._layout: int | None = None
        """Hash of the latest layout (shapes, strides and storages) of the block's own tensors."""

    def key(
        self,
        block: nn.Module,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        tiling: Tiling | None = None,
    ) -> CallKey | None:
        """Return the key of a call `fn(*args, **kwargs)` of `block` that is about to run. Return None if Dynamo cannot
        trace the call. `paths.untraced` is then the reason.

        If `tiling` is given, the key contains the names of the modules that run in tiles, but not the number of tiles,
        on which the operators of the tape do not depend.
        """
        if not GUARDS_PARAMETERS or self._layout is None:
            self._layout = hash(block_layout(block))
        traced = self.paths.key(block, fn, args)
        if traced is None:
            return None
        path, numbers = traced
        tiled = None if tiling is None else (tiling.modules, tiling.backward_only)
        return CallKey((argument_layout(args, kwargs), numbers, path, settings_of_torch(), tiled), self._layout)

    def with_current_layout(self, key: CallKey, block: nn.Module) -> CallKey:
        """Return a copy of `key` with the present layout of the block's own tensors (`block_layout`)."""
        self._layout = hash(block_layout(block))
        return key._replace(layout=self._layout)


def _aliased_arguments(tensors: tuple[Any, ...], scope: Scope) -> list[tuple[int, str]]:
    """Return (index in `tensors`, name) of each tensor that shares a storage with one of the block's own."""
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
    """Return settings of torch on which operators depend, but which Dynamo's guards do not compare."""
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


def plain_arguments(scope: Scope) -> tuple[Hashable, ...]:
    """Return a call's numbers, strings and containers, with other objects replaced by None."""
    named = [_plain_arguments(value) for name, value in scope["kwargs"].items() if name not in INERT_ARGUMENTS]
    return *[_plain_arguments(value) for value in scope["args"]], *named


def _plain_arguments(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain_arguments(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _plain_arguments(item)) for name, item in value.items())
    return value if isinstance(value, (bool, int, float, str)) else None
