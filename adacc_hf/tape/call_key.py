"""Keys of a block's calls, and a table that maps each key to a tape (record of a call's operators).

A call may run on a tape only if there is evidence that the call runs the tape's operators (rule R8). An equal key is a
part of this evidence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.tape.data_reads import Data, data_at
from adacc_hf.tape.guards import BlockPaths, Untraceable, settings_of_torch
from adacc_hf.tape.inputs import (
    Args,
    Kwargs,
    argument_layout,
    block_layout,
)
from adacc_hf.tape.symbolic_tape import SymbolicTape
from adacc_hf.tape.tape import Tape

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
    """Key of a block's call. Two calls with equal keys, of blocks of one kind, run the same operators.

    If Dynamo cannot trace the block, calls with equal keys may run different operators, so each call is validated
    (run/validation.py).
    """

    shape: Hashable
    """(layout of the tensor arguments, input numbers of the traced path, number of the path, settings of torch, name of
    the module that runs in tiles). A traced path is Dynamo's trace of one path through the block's code."""
    data: tuple[Data | None, ...]
    """Elements of the arguments that the block reads into Python, in order. None for an argument whose elements are not
    part of keys."""
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
    varies: bool = False
    """True if calls with the entry's key have repeatedly run other operators than those on the tape."""


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
        """The reason why the latest call must be validated. None if Dynamo's guards prove that the call runs the
        operators on its tape."""
        self.layouts: OrderedDict[int, None] = OrderedDict()
        """Hashes of the layouts (shapes, strides and storages) of the block's own tensors, the latest last."""
        self._layout = 0
        """Hash of the latest layout of the block's own tensors."""
        self._num_layouts = self._num_calls = 0
        self._num_divergences: OrderedDict[CallKey, int] = OrderedDict()
        """For each call key, the number of calls that ran other operators than those on the key's tape."""
        self._reads: tuple[tuple[Any, ...], ...] = ()
        """Paths, within a call's arguments, of the tensors whose elements the block reads into Python."""
        self._new_data: OrderedDict[CallKey, None] = OrderedDict()
        """Keys of calls whose shapes were recorded with other data. Each of these keys has occurred once."""
        self.followers: WeakSet[Follower] = WeakSet()
        """Caches that drop the entry of a key when this table drops the key."""
        self.was_compared = False
        """True if, in the current run, a call of the block was recorded, or compared with its tape operator by
        operator."""
        self.symbolic_shapes: WeakKeyDictionary[SymbolicTape, KnownShape] = WeakKeyDictionary()
        """Entries that count calls by symbolic tape, which is one tape for all sizes."""

    def key(
        self,
        block: nn.Module,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        tiling: Tiling | None = None,
    ) -> CallKey:
        """Return the key of a call `fn(*args, **kwargs)` of `block` that is about to run.

        If `tiling` is given, modules of the block run in tiles (groups of rows), and the key contains the modules'
        names. The number of tiles does not matter, because the operators on the tape do not depend on it.

        Call this method exactly once per call of the block, because the method counts calls.
        """
        if self._paths is None:
            self._paths = BlockPaths(block, self._untraceable)
            self._note_layout(block)
        self._num_calls += 1
        path, numbers = self._paths.key(fn, args)
        self.untraced = self._paths.untraced
        data = tuple([data_at(path, args, kwargs) for path in self._reads])
        tiled = None if tiling is None else (tiling.modules, tiling.backward_only)
        return CallKey((argument_layout(args, kwargs), numbers, path, settings_of_torch(), tiled), data, self._layout)

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

    def outdate(self, key: CallKey) -> None:
        """Forget the tape of `key`, because a call ran other operators than those on the tape.

        The next call with this key is recorded again.
        """
        put_latest(self._num_divergences, key, self.num_divergences(key) + 1, MAX_SHAPES)
        self._forget([key])

    def num_divergences(self, key: CallKey) -> int:
        """Return the number of calls with this key that ran other operators than those on the key's tape."""
        return self._num_divergences.get(key, 0)

    def has_new_data(self, key: CallKey) -> bool:
        """Return True if calls of this shape were recorded, and this call's data occurs for the first time.

        The data is the elements of tensors that the block reads into Python. The first call with new data is not
        recorded, for two reasons: the budget reserves the memory for recording only for new shapes, and recording pays
        off only if the data occurs again. The method stores `key`, so the second call with the same data returns False
        and can be recorded.
        """
        known_data = {known_key.data for known_key in self if known_key.shape == key.shape}
        if not known_data or key.data in known_data or key in self._new_data:
            return False
        put_latest(self._new_data, key, None, MAX_SHAPES)
        return True

    def add(self, key: CallKey, known_shape: KnownShape) -> CallKey:
        """Add a recorded call of the block to this table. Return the call's key.

        If the block read arguments into Python that no earlier call read, the returned key also contains the elements
        of these arguments.
        """
        reads = known_shape.tape.reads
        new_paths = [path for path in reads if path not in self._reads]
        if new_paths:
            self._reads = (*self._reads, *new_paths)
            # The keys of earlier records lack this data, on which their operators may depend too.
            self._forget(list(self))
            key = key._replace(data=(*key.data, *(reads[path] for path in new_paths)))
        self[key] = known_shape
        self.move_to_end(key)
        self._forget(list(self)[:-MAX_SHAPES])
        return key

    def known_shape_of(self, symbolic_tape: SymbolicTape) -> KnownShape:
        """Return the entry that counts calls of the block at all sizes that `symbolic_tape` covers.

        The entry's `num_calls` starts at 2, so the validation of a key's 2nd call (`is_checked_call`) is skipped. The
        first calls of a symbolic tape are validated by size instead (`Tape.due_check`).
        """
        return self.symbolic_shapes.setdefault(symbolic_tape, KnownShape(symbolic_tape.base, num_calls=2))

    def _forget(self, keys: list[CallKey]) -> None:
        for key in keys:
            del self[key]
            for follower in self.followers:
                follower.forget(key)
