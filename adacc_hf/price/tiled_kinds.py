"""Kinds of blocks with a row-wise module in tiles, measured like the kinds without tiles.

The same batch runs again with the module of each block in tiles, which adds a recording, a forward, and a forward and
backward. Codecs and times are those of the kind without tiles, because a tensor's codecs do not depend on tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from adacc_hf.artifacts.call_names import block_of_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.artifacts.profile import KindProfile, Operator, Profile, Value
from adacc_hf.artifacts.tiles import MEASURED_TILES, RowTiles, Tiling
from adacc_hf.price.batch_subsampling import Batch
from adacc_hf.price.cost_model import Prices
from adacc_hf.price.measurement import MemoryOnlyMeasurement
from adacc_hf.price.model_recorder import record_model
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.profiled_model import ProfiledModel
from adacc_hf.price.tile_memory import TileMemory
from adacc_hf.tape.row_wise import RowWiseModule, row_wise_module
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tiled_rows import refusal_of

log = logging.getLogger(__name__)

MeasureKinds = Callable[[ProfiledModel, Batch, ModelRecording], Sequence[KindProfile]]
"""Function that measures the memory of all recorded kinds of blocks."""


def with_tiled_kinds(
    profile: Profile, profiled: ProfiledModel, batch: Batch, recording: ModelRecording, measure: MeasureKinds
) -> Profile:
    """Return `profile` with a kind in tiles for each kind of blocks that has a row-wise module.

    `recording` is the recording that `profile` was measured from. `measure` measures another recording.
    """
    modules = _row_wise_modules(profiled, recording)
    if not modules:
        return profile
    tilings = {
        block.name: Tiling(module=modules[block.kind].path, num_tiles=MEASURED_TILES)
        for block in recording.blocks
        if block.kind in modules
    }
    unpriced = replace(profiled, measurement=_Unpriced(profiled.measurement))
    tiled_recording = record_model(unpriced, batch, recording.tape_cache, tilings)
    if [shared.name for shared in tiled_recording.shared] != [shared.name for shared in recording.shared]:
        return profile  # the records of tensors that several blocks share would not fit the other kinds
    pairs = {
        block.kind: (block, tiled)
        for block, tiled in zip(recording.blocks, tiled_recording.blocks, strict=True)
        if block.kind in modules
    }
    tiled_kinds = list(tiled_recording.kinds)
    for index, (_, tiled) in pairs.items():
        memory = tiled_recording.tile_memory.get(tiled.tape.digest)
        tiles = None if memory is None else _row_tiles(modules[index], memory, tiled.tape)
        tiled_kinds[tiled.kind] = replace(tiled_kinds[tiled.kind], tiles=tiles)
    measured = measure(unpriced, batch, replace(tiled_recording, kinds=tiled_kinds))
    kinds = list(profile.kinds)
    for index, (block, tiled) in pairs.items():
        kind = measured[tiled.kind]
        if kind.tiles is not None and kind.untrusted is None:
            kinds.append(_with_prices(kind, tiled.tape, profile.kinds[index], block.tape, modules[index]))
            kinds[index] = replace(kinds[index], tiled=len(kinds) - 1)
    return replace(profile, kinds=tuple(kinds))


def _row_wise_modules(profiled: ProfiledModel, recording: ModelRecording) -> dict[int, RowWiseModule]:
    """Return the row-wise module of each kind of blocks that has one and may run it in tiles, by the kind's index."""
    tapes = {block.kind: block.tape for block in recording.blocks}
    modules = {kind: row_wise_module(tape) for kind, tape in tapes.items()}
    refusals: set[int] = set()
    for block in recording.blocks:
        module = modules[block.kind]
        if module is None:
            continue
        owner = profiled.installation.modules[block_of_call(block.name)].get_submodule(module.path)
        reason = refusal_of(owner)
        if reason is not None:
            log.info("Adacc: %s of block %s does not run in tiles: %s", module.path, block.name, reason)
            refusals.add(block.kind)
    return {kind: module for kind, module in modules.items() if module is not None and kind not in refusals}


def _row_tiles(module: RowWiseModule, memory: TileMemory, tape: Tape) -> RowTiles:
    """Return the tiles of a row-wise module. `tape` has the module in tiles, as one operator."""
    operator = next(op.index for op in tape.operators if op.is_function and not op.target.may_run_again)
    return RowTiles(
        module=module.path,
        operator=operator,
        num_operators=len(module.operators),
        num_rows=module.num_rows,
        forward=memory.forward,
        backward=memory.backward,
        num_tiles=MEASURED_TILES,
    )


def _with_prices(
    tiled: KindProfile, tiled_tape: Tape, kind: KindProfile, tape: Tape, module: RowWiseModule
) -> KindProfile:
    """Return the kind `tiled` with the prices of `kind`, which has the same operators without tiles. The memory of a
    tile is left out of its events: it depends on the number of tiles."""
    matching, _ = tape.values_in(tiled_tape)
    sources = {own: kind.values[value] for value, own in matching.items()}
    inside = set(module.operators)
    outside = iter([operator for operator in kind.operators if operator.index not in inside])
    assert tiled.tiles is not None  # the caller has checked
    module_ms = sum(kind.operators[index].ms for index in module.operators)
    operators = tuple(
        replace(operator, ms=module_ms, replayable=False)
        if operator.index == tiled.tiles.operator
        else _priced_operator(operator, next(outside))
        for operator in tiled.operators
    )
    return replace(
        tiled,
        values=tuple(_priced_value(value, sources.get(value.index)) for value in tiled.values),
        operators=operators,
        forward_ms=kind.forward_ms,
        block_actions=(BlockAction.PLAIN,),
        host_link=kind.host_link,
    ).in_tiles(0)


def _priced_value(value: Value, source: Value | None) -> Value:
    if source is None:
        return value
    return replace(
        value,
        role=source.role,
        codecs=source.codecs if value.activation else (),
        replay_error=source.replay_error,
        too_coarse=source.too_coarse,
        is_movable=source.is_movable and value.activation,
    )


def _priced_operator(operator: Operator, source: Operator) -> Operator:
    return replace(operator, ms=source.ms, extra_bytes=source.extra_bytes)


class _Unpriced(MemoryOnlyMeasurement):
    """Measurement of memory in which operators have no times and no workspaces. They are known already."""

    def price(
        self,
        tape: Tape,
        bases: list[torch.Tensor],
        config: AdaccConfig,
        outliers: dict[int, int],
        run_block: Callable[[], object] | None = None,
    ) -> Prices:
        return Prices([0.0] * len(tape.operators), [0] * len(tape.operators))
