"""Numbers of tiles, and the memory of one tile."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.artifacts.files import from_fields
from adacc_hf.artifacts.tiles import (
    MIN_ROWS,
    MIN_TILE_ROWS,
    ModuleTiles,
    RowTiles,
    Tiling,
    highest_lines,
    most_tiles,
    tile_rows,
)

TILES = ModuleTiles(
    module="mlp", operators=(0,), num_operators=3, num_rows=100, forward=((0, 4),), backward=((500, 1), (0, 7))
)


@given(rows=st.integers(1, 10**6), number=st.integers(1, 2000))
def test_tiles_cover_all_rows(rows, number):
    size = tile_rows(rows, number)
    assert size * number >= rows
    assert (size - 1) * number < rows or size == 1


def test_few_rows_get_no_tiles_and_no_tile_is_short():
    assert most_tiles(MIN_ROWS - 1) == 0
    for rows in (MIN_ROWS, MIN_ROWS + 1, 131072, 10**6):
        number = most_tiles(rows)
        assert number >= 2
        assert tile_rows(rows, number) >= MIN_TILE_ROWS
        assert tile_rows(rows, 2 * number) < MIN_TILE_ROWS


def test_the_bytes_of_a_tile_are_the_highest_moment():
    assert TILES.forward_bytes(0) == TILES.backward_bytes(0) == 0
    assert TILES.forward_bytes(4) == 25 * 4
    assert TILES.backward_bytes(4) == 525
    assert TILES.backward_bytes(2) == 550


def test_the_second_of_two_tiles_may_have_a_row_less():
    odd = ModuleTiles(module="mlp", operators=(0,), num_operators=3, num_rows=9, forward=((0, 1),), backward=((0, 1),))
    assert (odd.forward_bytes(2), odd.backward_bytes(2)) == (5, 4)
    assert (odd.forward_bytes(3), odd.backward_bytes(3)) == (3, 3)


def test_every_tile_after_the_first_launches_its_operators_again():
    assert TILES.extra_ms(1, 10.0, 0.5) == 10.0
    assert TILES.extra_ms(3, 10.0, 0.5) == 10.0 + 4 * 2 * 3 * 0.5


def test_only_lines_that_are_the_highest_somewhere_remain():
    assert highest_lines([(0, 1), (5, 0), (0, 1), (4, 0), (0, 0.5)]) == ((5, 0), (0, 1))


def test_modules_of_a_kind_run_in_equally_many_tiles():
    norm = replace(TILES, module="norm", num_rows=200, is_backward_only=True, forward=())
    tiles = RowTiles(modules=(norm, TILES), num_tiles=4)
    tiling = Tiling(modules=("norm", "mlp"), backward_only=("norm",), num_tiles=4)
    assert (tiles.num_rows, tiles.tiling) == (100, tiling)
    assert replace(tiles, num_tiles=0).tiling is None
    assert from_fields(Tiling, json.loads(json.dumps(vars(tiling)))) == tiling
    assert norm.forward_bytes(4) == 0
    assert norm.extra_ms(3, 10.0, 0.5) == 10.0 + 3 * 2 * 3 * 0.5


@pytest.mark.parametrize("wrong", [{"num_tiles": 1}, {"num_tiles": "2"}, {"modules": (3,)}, {"modules": ()}])
def test_a_damaged_tiling_is_refused(wrong):
    with pytest.raises(ValueError, match="2 tiles or more"):
        Tiling(**{"modules": ("mlp",), "backward_only": (), "num_tiles": 4, **wrong})
