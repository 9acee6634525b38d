"""Kinds of blocks with row-wise modules in tiles, recorded in another micro-batch. Their codecs and times are those of
the kinds without tiles, because a tensor's codecs do not depend on tiles."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from adacc_hf.artifacts.call_names import block_of_call
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import KindProfile, Value
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.tiles import MEASURED_TILES, ModuleTiles, RowTiles, Tiling
from adacc_hf.price.codec_selection import with_outliers
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.tile_memory import TileMemory, tiled_operators
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.row_wise import RowWiseModule, row_wise_modules
from adacc_hf.tape.tape import Tape
from adacc_hf.tape.tiled_rows import refusal_of

log = logging.getLogger(__name__)


class TiledKinds:
    """Kinds of blocks with row-wise modules, to be measured in tiles.

    `profile` was measured from `recording`. Record another micro-batch with `tilings`, and pass its recording to
    `added`.
    """

    def __init__(
        self, profile: Profile, recording: ModelRecording, installation: Installation, config: AdaccConfig
    ) -> None:
        self.profile, self._recording = profile, recording
        self._modules = _row_wise_modules(installation, recording) if config.allows_tiles else {}
        self.tilings = {
            block.name: Tiling(
                modules=tuple(module.path for module in self._modules[block.kind]),
                backward_only=tuple(module.path for module in self._modules[block.kind] if not module.has_products),
                num_tiles=MEASURED_TILES,
            )
            for block in recording.blocks
            if block.kind in self._modules
        }
        """The tiles in which modules of each block call are measured. Empty if no module can run in tiles."""

    def added(self, tiled: ModelRecording) -> Profile:
        """Return the profile with more kinds: those of `tiled`, a recording of the same calls with modules in tiles."""
        profile, recording, modules = self.profile, self._recording, self._modules
        shared_names = [[shared.name for shared in each.shared_tensors.records] for each in (tiled, recording)]
        if shared_names[0] != shared_names[1]:
            return profile  # the records of tensors that several blocks share would not fit the other kinds
        if [block.name for block in tiled.blocks] != [block.name for block in recording.blocks]:
            return profile
        blocks = zip(recording.blocks, tiled.blocks, strict=True)
        pairs = {block.kind: (block, in_tiles) for block, in_tiles in blocks if block.kind in modules}
        kinds = list(profile.kinds)
        for index, (block, in_tiles) in pairs.items():
            tiles = _row_tiles(modules[index], in_tiles.tile_memory, in_tiles.tape)
            kind = replace(tiled.kinds[in_tiles.kind], tiles=tiles)
            if kind.tiles is None or kind.untrusted is not None:
                continue
            priced_kind = _priced_kind(kind, in_tiles.tape, profile.kinds[index], block.tape, modules[index])
            if priced_kind is not None:
                kinds.append(priced_kind)
                kinds[index] = replace(kinds[index], tiled=len(kinds) - 1)
            else:
                log.info("Adacc: block %s ran other operators in tiles, so it does not run in tiles", block.name)
        return replace(profile, kinds=tuple(kinds))


def _row_wise_modules(installation: Installation, recording: ModelRecording) -> dict[int, list[RowWiseModule]]:
    """Return the row-wise modules that may run in tiles, by the index of their kind of blocks."""
    tapes = {block.kind: block.tape for block in recording.blocks}
    modules = {kind: list(row_wise_modules(tape)) for kind, tape in tapes.items()}
    for block in recording.blocks:
        for module in list(modules[block.kind]):
            owner = installation.modules[block_of_call(block.name)].get_submodule(module.path)
            reason = refusal_of(owner)
            if reason is not None:
                log.info("Adacc: %s of block %s does not run in tiles: %s", module.path, block.name, reason)
                modules[block.kind].remove(module)
    return {kind: of_kind for kind, of_kind in modules.items() if of_kind}


def _row_tiles(modules: Sequence[RowWiseModule], memory: Mapping[str, TileMemory], tape: Tape) -> RowTiles | None:
    """Return the tiles of a kind, recorded on `tape`, or None if the memory of a module's tiles is unknown."""
    stand_ins = tiled_operators(tape)
    tiles = []
    for module in modules:
        if module.path not in memory or (module.has_products and module.path not in stand_ins):
            return None
        own = [op.index for op in tape.operators if f"{op.module}.".startswith(f"{module.path}.")]
        tiles.append(
            ModuleTiles(
                module=module.path,
                is_backward_only=not module.has_products,
                operators=(stand_ins[module.path].index,) if module.has_products else tuple(own),
                num_operators=len(module.operators),
                num_rows=module.num_rows,
                forward=memory[module.path].forward if module.has_products else (),
                backward=memory[module.path].backward,
            )
        )
    return RowTiles(modules=tuple(tiles), num_tiles=MEASURED_TILES)


def _priced_kind(
    tiled: KindProfile, tiled_tape: Tape, kind: KindProfile, tape: Tape, modules: Sequence[RowWiseModule]
) -> KindProfile | None:
    """Return the kind `tiled` with the times and codecs of `kind`, which was measured on `tape` without tiles, and
    without the memory of any tile. `modules` are the modules in tiles.

    Return None if other operators run around these modules. A mixture of experts, for example, may run others in the
    second recording.
    """
    products = {module.path: module for module in modules if module.has_products}
    # A module with a matrix product is one operator in the kind with tiles.
    stand_ins = {op.index: products[path] for path, op in tiled_operators(tiled_tape).items() if path in products}
    inside = {index for module in products.values() for index in module.operators}
    outside = [operator for operator in kind.operators if operator.index not in inside]
    names = [operator.name for operator in tiled.operators if operator.index not in stand_ins]
    if len(stand_ins) != len(products) or names != [operator.name for operator in outside]:
        return None
    matching, _ = tape.values_in(tiled_tape)
    sources = {own: value for value, own in matching.items()}
    timed_operators, operators = iter(outside), []
    for operator in tiled.operators:
        module = stand_ins.get(operator.index)
        if module is None:
            source = next(timed_operators)
            operators.append(replace(operator, ms=source.ms, extra_bytes=source.extra_bytes))
        else:
            module_ms = sum(kind.operators[index].ms for index in module.operators)
            operators.append(replace(operator, ms=module_ms, replayable=False))
            sources |= dict.fromkeys(operator.outputs, module.result)
    return replace(
        tiled,
        values=tuple(_priced_value(value, sources.get(value.index), kind, tape) for value in tiled.values),
        operators=tuple(operators),
        forward_ms=kind.forward_ms,
        block_actions=(BlockAction.PLAIN,),
        host_link=kind.host_link,
    ).in_tiles(0)


def _priced_value(value: Value, index: int | None, kind: KindProfile, tape: Tape) -> Value:
    """Return a copy of `value` with the codecs of value number `index` of the kind without tiles."""
    if index is None:
        return value
    source = kind.values[index]
    value = replace(value, role=source.role, replay_error=source.replay_error)
    if not value.activation:
        return replace(value, codecs=(), too_coarse=(), is_movable=False)
    if source.activation:
        return replace(value, codecs=source.codecs, too_coarse=source.too_coarse, is_movable=source.is_movable)
    # Without tiles, backward reads a copy of the value in another dtype, as in norms that compute in float32.
    for operator in (tape.operators[reader] for reader in tape.consumers(index)):
        copy = kind.values[operator.results()[0]] if operator.short_name == "to_copy" else None
        if copy is not None and copy.activation:
            outliers = max((dict(option.options).get("num_outliers", 0) for option in copy.codecs), default=0)
            codecs = with_outliers(copy.codecs, tape, index, outliers)
            return replace(value, codecs=codecs, too_coarse=copy.too_coarse)
    return value
