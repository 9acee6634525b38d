"""Keys of a block's calls, and the table of a block's known shapes, which maps each key to a tape (rule R8)."""

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
"""Maximum number of remembered layouts of a block's own tensors. The least recently used layout is dropped."""
MANY_LAYOUTS, CALLS_PER_LAYOUT = 8, 16
"""The layout of a block's own tensors counts as unstable after MANY_LAYOUTS layouts, if the block was called fewer than
CALLS_PER_LAYOUT times per layout."""
MAX_SHAPES = 512
"""Maximum number of shapes that a block remembers. The least recently used shape is dropped.

The limit is high because sequences have hundreds of lengths, and recording a shape again takes as long as about ten
steps. A tape and a plan for the tape take about 130 KiB of Python objects."""


class CallKey(NamedTuple):
    """Key of a call: two calls of one kind of block with equal keys run the same operators.

    For a block that Dynamo cannot trace, calls with equal keys may run different operators, so each call is validated
    (run/validation.py).
    """

    shape: Hashable
    """(layout of the tensor arguments, input numbers of the traced path, number of the path, settings of torch, path of
    the module that runs in tiles)."""
    data: tuple[Data | None, ...]
    """Data of the arguments that the block reads into Python, in order. None for an argument without data."""
    layout: int
    """Hash of the layout of the block's own tensors (`block_layout`). Plans also compare the layout of the tensors that
    replay reads (`ExecutionPlan.has_all`)."""


@dataclass(slots=True)
class KnownShape:
    """Entry of one call key: the tape that a block's calls with this key run, and the number of these calls.

    Calls under all plans of the block are counted.
    """

    tape: Tape
    num_calls: int = 1
    varies: bool = False
    """True if calls repeatedly ran operators that differ from the tape's."""


class Follower(Protocol):
    """Object that caches data by call key, and must drop an entry when the block forgets the key."""

    def forget(self, key: CallKey) -> None:
        """Drop the entry cached for `key`, if any."""


class KnownShapes(OrderedDict[CallKey, KnownShape]):
    """Table of a block's known shapes by call key: the tape of each key, and the number of calls with the key.

    The latest key is last. All plans of a block share one table. If the table drops a key, the plans drop their entries
    for this key.
    """

    def __init__(self, untraceable: Untraceable | None = None) -> None:
        super().__init__()
        self._untraceable = untraceable
        """Paths of the model's blocks that Dynamo cannot trace. None if the block is not part of a model."""
        self._paths: BlockPaths | None = None
        """Traced paths of the block (tape/guards.py). None before the block's first call."""
        self.layouts: OrderedDict[int, None] = OrderedDict()
        """Hashes of the layouts of the block's own tensors, the latest last."""
        self._layout = 0
        """Hash of the latest layout."""
        self._num_layouts = self._num_calls = 0
        self._num_divergences: OrderedDict[CallKey, int] = OrderedDict()
        """Number of calls that diverged from the tape of their key."""
        self._reads: tuple[tuple[Any, ...], ...] = ()
        """Paths of the arguments that the block reads into Python."""
        self._new_data: OrderedDict[CallKey, None] = OrderedDict()
        """Keys of calls with a known shape and new data, each of which has occurred once."""
        self.followers: WeakSet[Follower] = WeakSet()
        """Caches that must drop the entries of keys that this table drops."""
        self.was_compared = False
        """True if a call of the block was validated or recorded in the current run."""
        self.symbolic_shapes: WeakKeyDictionary[SymbolicTape, KnownShape] = WeakKeyDictionary()
        """Entry that counts the calls at all sizes, by symbolic tape."""

    @property
    def untraced(self) -> str | None:
        """The reason why the latest call must be validated. None if guards prove that the call runs the tape's
        operators."""
        return None if self._paths is None else self._paths.untraced

    def key(
        self,
        block: nn.Module,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        tiling: Tiling | None = None,
    ) -> CallKey:
        """Return the key of a call of `block` that is about to run: `fn(*args, **kwargs)`, with modules in tiles if
        `tiling` is given. The operators on the tape do not depend on the number of tiles.

        Call this method exactly once per call of the block, because the method counts calls.
        """
        if self._paths is None:
            self._paths = BlockPaths(block, self._untraceable)
            self._note_layout(block)
        self._num_calls += 1
        path, numbers = self._paths.key(fn, args)
        data = tuple([data_at(path, args, kwargs) for path in self._reads])
        tiled = None if tiling is None else (tiling.modules, tiling.backward_only)
        return CallKey((argument_layout(args, kwargs), numbers, path, settings_of_torch(), tiled), data, self._layout)

    def with_current_layout(self, key: CallKey, block: nn.Module) -> CallKey:
        """Return a copy of `key` with the current layout of the block's own tensors.

        The layout changes, for example, if weights are moved into one storage, or if an attached table, such as rotary
        embeddings, grows.
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
        """Forget the tape of `key`, because a call diverged from the tape.

        The next call with this key is recorded again.
        """
        put_latest(self._num_divergences, key, self.num_divergences(key) + 1, MAX_SHAPES)
        self._forget([key])

    def num_divergences(self, key: CallKey) -> int:
        """Return the number of calls of this key that ran operators different from the key's tape."""
        return self._num_divergences.get(key, 0)

    def has_new_data(self, key: CallKey) -> bool:
        """Return True if calls of this shape were recorded, and this call's data occurs for the first time.

        The data is the elements of tensors that the block reads into Python. The first call with new data is not
        recorded: recording takes memory, which the budget reserves only for new shapes, and time, which is worthwhile
        only if the data occurs again. The method stores the key, and returns False the second time.
        """
        known_data = {known_key.data for known_key in self if known_key.shape == key.shape}
        if not known_data or key.data in known_data or key in self._new_data:
            return False
        put_latest(self._new_data, key, None, MAX_SHAPES)
        return True

    def add(self, key: CallKey, known_shape: KnownShape) -> CallKey:
        """Add a recorded call of the block to this table. Return the call's key.

        If the call read arguments into Python that no earlier call read, the returned key also contains the data of
        these arguments.
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
        """Return the entry that counts calls at all sizes of `symbolic_tape`.

        The entry's `num_calls` starts at 2, because calls at some sizes were recorded already.
        """
        return self.symbolic_shapes.setdefault(symbolic_tape, KnownShape(symbolic_tape.base, num_calls=2))

    def _forget(self, keys: list[CallKey]) -> None:
        for key in keys:
            del self[key]
            for follower in self.followers:
                follower.forget(key)
