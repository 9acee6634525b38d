"""Cutting a graph into segments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.artifacts.profile import KindProfile, Operator, Value
from adacc_hf.compiler.segments import cut_into_segments


def _value(index: int, producer: int | None, nbytes: int) -> Value:
    return Value(
        index=index, name="", shape=(nbytes,), encoded_shape=(nbytes,), dtype="uint8", nbytes=nbytes,
        producer=producer, saved=True, activation=True, shared=None, recomputable=True, role="other",
    )  # fmt: skip


def _chain(sizes: list[int]) -> KindProfile:
    """Operators one after the other, each reading what the last one made; value 0 is given."""
    values = [_value(0, None, 8), *(_value(j + 1, j, nbytes) for j, nbytes in enumerate(sizes))]
    operators = [
        Operator(index=j, name="", module="", inputs=(j,), outputs=(j + 1,), ms=1.0, replayable=True)
        for j in range(len(sizes))
    ]
    return KindProfile(
        digest="", block_class="", values=tuple(values), operators=tuple(operators), slots=(), forward=(),
        backward=(), forward_ms=0.0,
    )  # fmt: skip


def test_blocks_are_cut_where_little_lives() -> None:
    """Four blocks whose insides are large, and whose results are small."""
    kind = _chain([100, 100, 100, 1] * 4)
    segments = cut_into_segments(kind, [value.nbytes for value in kind.values])
    assert segments.boundary == {4, 8, 12}
    assert segments.of_value == (0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)


def test_a_graph_with_nothing_small_in_it_stays_whole() -> None:
    kind = _chain([100, 101, 102, 103])
    assert cut_into_segments(kind, [value.nbytes for value in kind.values]).count == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_no_replay_crosses_a_boundary(sizes: list[int]) -> None:
    kind = _chain(sizes)
    held = [value.nbytes for value in kind.values]
    segments = cut_into_segments(kind, held)
    for operator in kind.operators:
        (read,), (made,) = operator.inputs, operator.outputs
        assert segments.of_value[read] == segments.of_value[made] or read in segments.boundary
    made_bytes = [0] * segments.count
    for value, segment in enumerate(segments.of_value):
        made_bytes[segment] += held[value]
    kept = sum(kind.values[value].nbytes for value in segments.boundary)
    assert kept + max(made_bytes) <= sum(held)
