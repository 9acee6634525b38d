"""Keys of a block's calls, and a table that maps each key to a tape (record of a call's operators).

A call may run on a tape only if there is evidence that the call runs the tape's operators (rule R8). An equal key is a
part of this evidence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.autograd.function import Function

from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.tape.guards import BlockPaths, GraphOfCall, Untraceable, settings_of_torch
from adacc_hf.tape.inputs import Args, Kwargs, argument_layout, block_layout
from adacc_hf.tape.symbolic_tape import SymbolicTape
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.dynamo import GUARDS_PARAMETERS

MAX_LAYOUTS = 64
"""Maximum number of remembered layouts (shapes, strides and storages) of a block's own tensors. The least recently used
layout is dropped."""
MANY_LAYOUTS, CALLS_PER_LAYOUT = 8, 16
"""Limits for an unstable layout (shapes, strides and storages) of a block's own tensors: at least MANY_LAYOUTS layouts
have occurred, and the block was called fewer than CALLS_PER_LAYOUT times per layout."""
MAX_SHAPES = 512
"""Maximum number of call keys, each for one shape of the arguments, that a block remembers. The least recently used key
is dropped.

The limit is high because sequences have hundreds of lengths, and recording a shape again takes as long as about ten
steps. A tape and a plan for the tape take about 130 KiB of Python objects.
"""


class CallKey(NamedTuple):
    """Key of a block's call. Two calls with equal keys, of blocks of one kind, run the same operators."""

    shape: Hashable
    """(layout of the tensor arguments, input numbers of the traced path, number of the path, settings of torch, name of
    the module that runs in tiles). A traced path is Dynamo's trace of one path through the block's code."""
    layout: int
    """Hash of the layout of the block's own tensors (`block_layout`). In addition, each execution plan compares the
    layout of the tensors that replay reads (`ExecutionPlan.fetch`)."""


@dataclass(slots=True)
class KnownShape:
    """Table entry of one call key: the tape (record of the operators) of calls with this key, and the number of these
    calls.

    The number includes the calls under all plans of the block.
    """

    tape: Tape
    num_calls: int = 1


class Follower(Protocol):
    """Object with cached data by call key. The object must drop an entry when the block's table drops the key."""

    def forget(self, key: CallKey) -> None:
        """Drop the entry cached for `key`, if any."""


class KnownShapes(OrderedDict[CallKey, KnownShape]):
    """Table from a block's call keys to tapes (records of the operators), with the number of calls of each key.

    The latest key is last. All plans of a block share one table. If the table drops a key, the plans drop their entries
    for this key.
    """

    def __init__(self, untraceable: Untraceable | None = None) -> None:
        super().__init__()
        self._untraceable = untraceable
        """Calls of the model's blocks that Dynamo cannot trace. None if the block is not part of a model."""
        self._paths: BlockPaths | None = None
        """Dynamo's traces of the block's code (tape/guards.py). None before the block's first call."""
        self.untraced: str | None = None
        """The reason why Dynamo cannot trace the latest call, or None."""
        self.layouts: OrderedDict[int, None] = OrderedDict()
        """Hashes of the layouts (shapes, strides and storages) of the block's own tensors, the latest last."""
        self._layout = 0
        """Hash of the latest layout of the block's own tensors."""
        self._num_layouts = self._num_calls = 0
        self.followers: WeakSet[Follower] = WeakSet()
        """Caches that drop the entry of a key when this table drops the key."""
        self.symbolic_shapes: WeakKeyDictionary[SymbolicTape, KnownShape] = WeakKeyDictionary()
        """Entries that count calls by symbolic tape, which is one tape for all sizes."""

    def key(
        self,
        block: nn.Module,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        tiling: Tiling | None = None,
    ) -> CallKey | None:
        """Return the key of a call `fn(*args, **kwargs)` of `block` that is about to run. Return None, and set
        `untraced`, if Dynamo cannot trace the call.

        If `tiling` is given, modules of the block run in tiles (groups of rows), and the key contains the modules'
        names. The number of tiles does not matter, because the operators on the tape do not depend on it.

        Call this method exactly once per call of the block, because the method counts calls.
        """
        if self._paths is None:
            self._paths = BlockPaths(block, self._untraceable)
            self._note_layout(block)
        self._num_calls += 1
        if not GUARDS_PARAMETERS:
            self._note_layout(block)
        traced = self._paths.key(fn, args)
        self.untraced = self._paths.untraced
        if traced is None:
            return None
        path, numbers = traced
        tiled = None if tiling is None else (tiling.modules, tiling.backward_only)
        return CallKey((argument_layout(args, kwargs), numbers, path, settings_of_torch(), tiled), self._layout)

    def leave_out(self, functions: Mapping[type[Function], Any]) -> bool:
        """Return True if the latest call, which Dynamo could not trace, may have a key if the trace leaves out
        `functions` (`Recorder.function_results`)."""
        return self._paths is not None and self._paths.leave_out(functions)

    @property
    def is_partly_traced(self) -> bool:
        """True if no guard covers a part of the latest call's code, so that the call must be checked."""
        return self._paths is not None and self._paths.is_partial

    def graph_of(
        self, tape: Tape, fn: Callable[..., Any], args: Args, may_differ: bool = False
    ) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """Return (graph, its inputs) of the latest call, `fn(*args)`. None if no graph has the operators of `tape`. If
        `may_differ`, the graph may have somewhat other operators."""
        return None if self._paths is None else self._paths.graph_of(tape, fn, args, may_differ)

    def graph_function(self) -> GraphOfCall | None:
        """Return a function from (fn, args) of a call like the latest one to (traced graph, its inputs). None if a
        recorded call had other operators than its graph."""
        return None if self._paths is None else self._paths.graph_function()

    def find_graph(self, block: nn.Module, fn: Callable[..., Any], args: Args) -> GraphOfCall | None:
        """Return `graph_function` of a call `fn(*args)` of `block` that was not passed to `key`, if it is traced."""
        if self._paths is None:
            self._paths = BlockPaths(block, self._untraceable)
            self._note_layout(block)
        return self._paths.find_graph(fn, args)

    def compare_graph(self, tape: Tape, fn: Callable[..., Any], args: Args) -> None:
        """Compare the traced graph of the latest call, `fn(*args)`, with `tape`, which was recorded in this call."""
        if self._paths is not None:
            self._paths.compare_graph(tape, fn, args)

    def has_other_numbers(self, tape: Tape, fn: Callable[..., Any], args: Args) -> bool:
        """Return True if the traced graph of the latest call, `fn(*args)`, shows that `tape` is wrong for its sizes."""
        return self._paths is not None and self._paths.has_other_numbers(tape, fn, args)

    def with_current_layout(self, key: CallKey, block: nn.Module) -> CallKey:
        """Return a copy of `key` with the present layout (shapes, strides and storages) of the block's own tensors.

        The layout changes, for example, if weights are moved into one storage, or if a table of the block, such as
        rotary embeddings, grows.
        """
        self._note_layout(block)
        return key._replace(layout=self._layout)

    def _note_layout(self, block: nn.Module) -> None:
        self._layout = hash(block_layout(block))
        self._num_layouts += self._layout not in self.layouts
        put_latest(self.layouts, self._layout, None, MAX_LAYOUTS)

    @property
    def has_unstable_layout(self) -> bool:
        """True if the layout of the block's own tensors, such as its parameters, keeps changing between calls.

        A layout is the shapes, strides and storages of these tensors. The constants MANY_LAYOUTS and CALLS_PER_LAYOUT
        define the limits.
        """
        return self._num_layouts >= MANY_LAYOUTS and self._num_calls < CALLS_PER_LAYOUT * self._num_layouts

    def add(self, key: CallKey, known_shape: KnownShape) -> None:
        """Add a recorded call of the block to this table."""
        self[key] = known_shape
        self.move_to_end(key)
        for old in list(self)[:-MAX_SHAPES]:
            del self[old]
            for follower in self.followers:
                follower.forget(old)

    def known_shape_of(self, symbolic_tape: SymbolicTape) -> KnownShape:
        """Return the entry that counts calls of the block at all sizes that `symbolic_tape` covers.

        The entry's `num_calls` starts at 2, so the check of a key's 2nd call (`is_checked_call`) is skipped. The first
        calls of a symbolic tape are checked by size instead (`Tape.is_unchecked`).
        """
        return self.symbolic_shapes.setdefault(symbolic_tape, KnownShape(symbolic_tape.base, num_calls=2))
