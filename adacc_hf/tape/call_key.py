"""Keys of a block's calls, and a table that maps each key to a tape. An equal key is a part of the evidence that a call
runs the tape's operators (rule R8)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import nn

from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.tape.guards import BlockPaths, Untraceable, settings_of_torch
from adacc_hf.tape.inputs import Args, Kwargs, argument_layout, block_layout
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.dynamo import GUARDS_PARAMETERS


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
