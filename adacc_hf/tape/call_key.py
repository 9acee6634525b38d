"""Keys of a block's calls, and a table that maps each key to a tape. An equal key is a part of the evidence that a call
runs the tape's operators (rule R8)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.tape.guards import BlockPaths, Untraceable, settings_of_torch
from adacc_hf.tape.inputs import Args, Kwargs, argument_layout, block_layout
from adacc_hf.tape.symbolic_tape import SymbolicTape
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.dynamo import GUARDS_PARAMETERS

MAX_SHAPES = 512
"""Maximum number of call keys that a block remembers, least recently used goes first. Sequences have hundreds of
lengths, and recording a shape again takes as long as about ten steps. A tape and its plan take about 130 KiB."""


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
    """Table entry of one call key: the tape of calls with this key, and their number under all plans of the block."""

    tape: Tape
    num_calls: int = 1


class KnownShapes(OrderedDict[CallKey, KnownShape]):
    """Table from a block's call keys to tapes, with the number of calls of each key. The latest key is last. All plans
    of a block share one table."""

    def __init__(self, untraceable: Untraceable | None = None) -> None:
        super().__init__()
        self.paths = BlockPaths(untraceable)
        """Dynamo's traces of the block's code."""
        self._layout: int | None = None
        """Hash of the latest layout (shapes, strides and storages) of the block's own tensors."""
        self.symbolic_shapes: WeakKeyDictionary[SymbolicTape, KnownShape] = WeakKeyDictionary()
        """Entries that count calls by symbolic tape."""

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

    def add(self, key: CallKey, known_shape: KnownShape) -> None:
        """Add a recorded call of the block to this table."""
        put_latest(self, key, known_shape, MAX_SHAPES)

    def known_shape_of(self, symbolic_tape: SymbolicTape) -> KnownShape:
        """Return the entry that counts calls of the block at all sizes that `symbolic_tape` covers.

        The entry's `num_calls` starts at 2, so the check of a key's 2nd call (`is_checked_call`) is skipped. The first
        calls of a symbolic tape are checked by size instead (`Tape.is_unchecked`).
        """
        return self.symbolic_shapes.setdefault(symbolic_tape, KnownShape(symbolic_tape.base, num_calls=2))
