"""Tiles: a row-wise module of a block runs on a few rows (tokens) at a time. Records without torch.

`tape/row_wise.py` finds the module, `tape/tiled_rows.py` runs it, `price/tiled_kinds.py` measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = "tile"
"""Word for tiles in `AdaccConfig.actions`."""
MIN_ROWS = 4096
"""Smallest number of rows (tokens of a micro-batch) at which tiles are considered. With fewer rows, a module's inner
tensors are small beside the sums of its gradients, and tiles may take more memory."""
MIN_TILE_ROWS = 512
"""Smallest number of rows of a tile. With fewer rows, matrix products are slow."""


MEASURED_TILES = 2
"""Number of tiles with which memory is measured. A run with one tile would need no sums of gradients."""
PASSES_PER_TILE = 4
"""Number of times that each tile's operators are launched, in forwards: forward, second forward, and a backward, which
launches about twice as many."""

Line = tuple[float, float]
"""(bytes, bytes per row)."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Execution of a block's row-wise module in tiles."""

    module: str
    """Path of the module in the block."""
    num_tiles: int

    def __post_init__(self) -> None:
        if not isinstance(self.module, str) or not isinstance(self.num_tiles, int) or self.num_tiles < 2:
            raise ValueError(f"{self.num_tiles!r} tiles of module {self.module!r}: a module has 2 tiles or more")


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Row-wise module of a kind of blocks: its memory and time with any number of tiles."""

    module: str
    """Path of the module in the block."""
    operator: int
    """Index of the operator that stands for the module in the kind's operators. Its time is that of one forward."""
    num_operators: int
    """Number of operators in the module."""
    num_rows: int
    """Number of rows of the module's input: the tokens of the micro-batch."""
    forward: tuple[Line, ...]
    """Memory of the forward of one tile at each of its moments, without input and result of the module."""
    backward: tuple[Line, ...]
    """Memory of the backward of one tile at each of its moments, without gradients of input, result and parameters."""
    num_tiles: int = 0
    """Number of tiles that the events of the kind include, or 0 if they include no tile."""

    def forward_bytes(self, num_tiles: int) -> int:
        """Return the peak of the forward of one of `num_tiles` tiles. 0 for no tiles."""
        return _highest(self.forward, tile_rows(self.num_rows, num_tiles) if num_tiles else 0)

    def backward_bytes(self, num_tiles: int) -> int:
        """Return the peak of the backward of one of `num_tiles` tiles. 0 for no tiles.

        This is the second tile: during the first one, the sums of the parameters' gradients do not exist yet. Of two
        tiles, the second may have a row less.
        """
        rows = tile_rows(self.num_rows, num_tiles) if num_tiles else 0
        return _highest(self.backward, min(rows, self.num_rows - rows))

    def extra_ms(self, num_tiles: int, forward_ms: float, launch_ms: float) -> float:
        """Return the time by which a step with tiles is longer than plain training's.

        The module's forward (`forward_ms`) runs a second time, and each tile but one launches kernels again.
        """
        return forward_ms + PASSES_PER_TILE * (num_tiles - 1) * self.num_operators * launch_ms


def _highest(lines: tuple[Line, ...], rows: int) -> int:
    """Return the bytes of the highest of `lines` at a number of rows, or 0 without rows."""
    return math.ceil(max(nbytes + per_row * rows for nbytes, per_row in lines)) if rows else 0


def most_tiles(num_rows: int) -> int:
    """Return the largest useful number of tiles for `num_rows` rows: a power of two, or 0 for few rows."""
    number = 1
    while num_rows >= MIN_ROWS and tile_rows(num_rows, 2 * number) >= MIN_TILE_ROWS:
        number *= 2
    return number if number > 1 else 0


def highest_lines(lines: list[Line]) -> tuple[Line, ...]:
    """Return the lines that are the highest at some number of rows, each once."""
    distinct = sorted(set(lines), reverse=True)
    return tuple(
        line
        for line in distinct
        if not any(other != line and other[0] >= line[0] and other[1] >= line[1] for other in distinct)
    )


def tile_rows(num_rows: int, num_tiles: int) -> int:
    """Return the number of rows of each tile but the last, which may have fewer."""
    return max(1, -(-num_rows // num_tiles))
