"""Tiles: a row-wise module of a block runs on a few rows (tokens) at a time. Records without torch.

`tape/row_wise.py` finds the module, `tape/tiled_rows.py` runs it, `price/tiled_kinds.py` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import KindProfile

TILE = "tile"
"""Word for tiles in `AdaccConfig.actions`."""
MIN_ROWS = 4096
"""Smallest number of rows (tokens of a micro-batch) at which tiles are considered. With fewer rows, a module's inner
tensors are small beside the sums of its gradients, and tiles may take more memory."""
MIN_TILE_ROWS = 512
"""Smallest number of rows of a tile. With fewer rows, matrix products are slow."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Execution of a block's row-wise module in tiles."""

    module: str
    """Path of the module in the block."""
    num_tiles: int


def tile_rows(num_rows: int, num_tiles: int) -> int:
    """Return the number of rows of each tile but the last, which may have fewer."""
    return max(1, -(-num_rows // num_tiles))
