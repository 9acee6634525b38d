"""What a graph may choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.partitioner.program import GraphModel, graph_model, keeping, least_bytes, least_time
from adacc_hf.profile import CodecOption, KindProfile, Operator, Value
from adacc_hf.solving.program import SolverLog

BLOCK = (100, 100, 100, 1)


def _value(index: int, nbytes: int, is_read: bool) -> Value:
    return Value(
        index=index, name="", shape=(nbytes,), encoded_shape=(nbytes,), dtype="uint8", nbytes=nbytes,
        producer=index - 1 if index else None, saved=is_read, activation=True, shared=None, recomputable=index > 0,
        role="other",
    )  # fmt: skip


def _chain(sizes: list[int], run_ms: float, keep_ms: float, is_read: list[bool] | None = None) -> GraphModel:
    """Operators one after the other, each reading what the last one made; value 0 is given.

    Backward reads what `is_read` says of what they make, or all.
    """
    read = [True, *(is_read or [True] * len(sizes))]
    operators = tuple(
        Operator(index=j, name="", module="", inputs=(j,), outputs=(j + 1,), ms=run_ms, replayable=True)
        for j in range(len(sizes))
    )
    kind = KindProfile(
        digest="", block_class="", values=tuple(map(_value, range(len(read)), [8, *sizes], read)),
        operators=operators, slots=(), forward=(), backward=(), forward_ms=0.0,
    )  # fmt: skip
    return graph_model(kind, dict.fromkeys(range(len(sizes) + 1), keep_ms), {}, [8, *sizes])


@given(st.integers(2, 5))
def test_what_lives_across_a_boundary_is_stored_at_any_price(blocks: int) -> None:
    """Else the first question of backward could have all of forward remade at once."""
    graph = _chain([*BLOCK] * blocks, run_ms=0.0, keep_ms=1.0)
    choice = least_time(graph, 10**6, SolverLog(), of_peak=False)
    assert choice is not None
    assert graph.segments.boundary
    assert choice.stored.keys() == {0, *graph.segments.boundary}
    assert choice.peak_bytes == 8 + sum(BLOCK) + blocks - 1


@given(st.lists(st.tuples(st.integers(1, 4096), st.booleans()), min_size=2, max_size=8))
def test_what_is_named_as_the_least_is_enough(made: list[tuple[int, bool]]) -> None:
    """Of values that backward reads or does not: nothing is stored across a boundary that nobody reads."""
    graph = _chain([nbytes for nbytes, _ in made], 1.0, 0.0, [is_read for _, is_read in made])
    for of_peak in (False, True):
        least = least_bytes(graph, SolverLog(), of_peak=of_peak)
        assert least_time(graph, least.peak_bytes if of_peak else least.nbytes, SolverLog(), of_peak=of_peak)


def test_the_least_bytes_are_those_of_boundaries() -> None:
    graph = _chain([*BLOCK] * 3, run_ms=1.0, keep_ms=0.0)
    assert least_bytes(graph, SolverLog(), of_peak=False).nbytes == 8 + 2


def test_of_the_choices_with_the_least_peak_it_is_the_fastest() -> None:
    graph = _chain([1024 * nbytes for nbytes in BLOCK] * 3, run_ms=1.0, keep_ms=0.0)
    least = least_bytes(graph, SolverLog(), of_peak=True)
    everything_remade = keeping(graph, {0, *graph.segments.boundary})
    assert least.peak_bytes == everything_remade.peak_bytes
    # The last segment is there when backward begins, whether it was stored or is remade.
    last = [value for value, segment in enumerate(graph.segments.of_value) if segment == graph.segments.count - 1]
    assert set(last) <= least.stored.keys()


def test_what_torch_would_keep_has_a_price_too() -> None:
    graph = _chain([*BLOCK], run_ms=2.0, keep_ms=1.0)
    assert keeping(graph, {0, 1, 2, 3, 4}).ms == 5.0
    choice = keeping(graph, {0, 2})
    assert (choice.ms, choice.nbytes) == (2 * 1.0 + 3 * 2.0, 108)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", {0}), ("int64", {0, 1})])
def test_indices_are_not_made_anew_from_what_was_coded(dtype: str, expected: set[int]) -> None:
    """Numbers come back nearly the same; an order of rows that were nearly equal may be another one."""
    lossy = CodecOption(codec="int8", options=(), nbytes=4, encode_ms=0.0, decode_ms=0.0, error=0.01, lossless=False)
    chain = _chain([4], run_ms=0.0, keep_ms=1.0).model.kind
    values = tuple(replace(value, dtype=of) for value, of in zip(chain.values, ("float32", dtype), strict=True))
    graph = graph_model(replace(chain, values=values), {0: 1.0, 1: 1.0}, {0: (lossy,)}, [8, 4])
    assert least_time(graph, 100, SolverLog(), of_peak=False).stored.keys() == expected


@pytest.mark.parametrize(("shape", "expected"), [((2, 2), {0}), ((4, 1), {0, 1})])
def test_statistics_are_stored_beside_rows_that_were_coded(shape: tuple[int, ...], expected: set[int]) -> None:
    lossy = CodecOption(codec="int8", options=(), nbytes=4, encode_ms=0.0, decode_ms=0.0, error=0.01, lossless=False)
    chain = _chain([4], run_ms=0.0, keep_ms=1.0).model.kind
    values = (chain.values[0], replace(chain.values[1], shape=shape))
    graph = graph_model(replace(chain, values=values), {0: 5.0, 1: 1.0}, {0: (lossy,)}, [8, 4])
    choice = least_time(graph, 100, SolverLog(), of_peak=False)
    assert choice.stored[0].codec == "int8"
    assert choice.stored.keys() == expected
