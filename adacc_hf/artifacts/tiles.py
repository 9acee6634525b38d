"""Tiles: row-wise modules of a block run on a few rows (tokens) at a time. Records without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = "tile"
"""Word for tiles in `AdaccConfig.actions`."""
MIN_ROWS = 4096
"""Smallest number of tokens at which tiles are considered. With fewer, the sums of gradients may take more memory than
a module's inner tensors."""
MIN_TILE_ROWS = 512
"""Smallest number of rows of a tile. With fewer rows, matrix products are slow."""
MEASURED_TILES = 2
"""Number of tiles with which memory is measured. A run with one tile would need no sums of gradients."""
PASSES_PER_TILE = 4
"""Launches of each tile's operators in a step, as a multiple of one forward's (2 forwards, 2 for the backward)."""

Line = tuple[float, float]
"""Straight line of bytes over rows, as (bytes at 0 rows, bytes per row)."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Execution of a block's row-wise modules in tiles."""

    modules: tuple[str, ...]
    """Paths of the modules in the block."""
    backward_only: tuple[str, ...]
    """Modules in `modules` whose forward runs on all rows at once, so that their results can be recomputed."""
    num_tiles: int

    def __post_init__(self) -> None:
        are_paths = self.modules and all(isinstance(module, str) for module in self.modules)
        if not are_paths or not isinstance(self.num_tiles, int) or self.num_tiles < 2:
            raise ValueError(f"{self.num_tiles!r} tiles of modules {self.modules!r}: a module has 2 tiles or more")


@dataclass(frozen=True, kw_only=True)
class ModuleTiles:
    """Row-wise module of a kind of block: its memory and time with any number of tiles."""

    module: str
    """Path of the module in the block."""
    is_backward_only: bool = False
    """True if only the module's backward runs in tiles."""
    operators: tuple[int, ...]
    """Indices of the module's operators in `KindProfile.operators`: a single one if its forward runs in tiles."""
    num_operators: int
    """Number of operators that each tile launches in one forward."""
    num_rows: int
    """Number of rows of the module's input: tokens, or a multiple of them (a norm of each head)."""
    forward: tuple[Line, ...]
    """Memory of one tile's forward at each moment, without input and result. Empty without forward tiles."""
    backward: tuple[Line, ...]
    """Memory of the backward of one tile at each of its moments, without gradients of input, result and parameters."""

    def forward_bytes(self, num_tiles: int) -> int:
        """Return the peak in bytes of the forward of one tile if there are `num_tiles` tiles, or 0 without tiles."""
        return _highest(self.forward, tile_rows(self.num_rows, num_tiles) if num_tiles else 0)

    def backward_bytes(self, num_tiles: int) -> int:
        """Return the peak in bytes of the backward of one tile, or 0 without tiles.

        It is that of the second tile, because the sums of gradients do not exist in the first. The second may have
        fewer rows.
        """
        rows = tile_rows(self.num_rows, num_tiles) if num_tiles else 0
        return _highest(self.backward, min(rows, self.num_rows - rows))

    def extra_ms(self, num_tiles: int, forward_ms: float, launch_ms: float) -> float:
        """Return the time that tiles add to plain training: the forward (`forward_ms`) runs a second time, and each
        tile but one launches kernels again."""
        passes = PASSES_PER_TILE - 1 if self.is_backward_only else PASSES_PER_TILE
        return forward_ms + passes * (num_tiles - 1) * self.num_operators * launch_ms


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """The row-wise modules of a kind of block, all in the same number of tiles."""

    modules: tuple[ModuleTiles, ...]
    """The modules, in the order in which they run."""
    num_tiles: int = 0
    """Number of tiles that the events of the kind include, or 0 if they include no tile."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the module with the fewest rows."""
        return min(module.num_rows for module in self.modules)

    @property
    def tiling(self) -> Tiling | None:
        """The tiles in which the modules run, or None if they do not run in tiles."""
        if not self.num_tiles:
            return None
        return Tiling(
            modules=tuple(module.module for module in self.modules),
            backward_only=tuple(module.module for module in self.modules if module.is_backward_only),
            num_tiles=self.num_tiles,
        )


def _highest(lines: tuple[Line, ...], rows: int) -> int:
    """Return the largest number of bytes of `lines` at `rows`, or 0 without rows or lines."""
    return math.ceil(max((nbytes + per_row * rows for nbytes, per_row in lines), default=0)) if rows else 0


def most_tiles(num_rows: int) -> int:
    """Return the largest useful number of tiles for `num_rows` rows: a power of two, or 0 for few rows."""
    number = 1
    while num_rows >= MIN_ROWS and tile_rows(num_rows, 2 * number) >= MIN_TILE_ROWS:
        number *= 2
    return number if number > 1 else 0


def highest_lines(lines: list[Line]) -> tuple[Line, ...]:
    """Remove duplicates from `lines`, and each line that another one equals or exceeds at every number of rows."""
    distinct = sorted(set(lines), reverse=True)
    return tuple(
        line
        for line in distinct
        if not any(other != line and other[0] >= line[0] and other[1] >= line[1] for other in distinct)
    )


def tile_rows(num_rows: int, num_tiles: int) -> int:
    """Return the number of rows of each tile but the last, which may have fewer."""
    return max(1, -(-num_rows // num_tiles))
