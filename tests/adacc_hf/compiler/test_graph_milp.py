"""The integer program of a compiled graph: the choices it allows."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile, Operator, Value
from adacc_hf.compiler.graph_milp import (
    GraphModel,
    cut_into_segments,
    graph_model,
    least_bytes,
    least_time,
    retaining_choice,
)
from adacc_hf.solve.milp import StoredForm

BLOCK = (100, 100, 100, 1)


def _value(index: int, nbytes: int, is_read: bool) -> Value:
    return Value(
        index=index, name="", shape=(nbytes,), encoded_shape=(nbytes,), dtype="uint8", nbytes=nbytes,
        producer=index - 1 if index else None, saved=is_read, activation=True, shared=None, recomputable=index > 0,
        role="other",
    )  # fmt: skip


def _chain(sizes: list[int], run_ms: float, keep_ms: float, is_read: list[bool] | None = None) -> GraphModel:
    """Return a chain of operators, each of which reads the last one's result; value 0 is the input."""
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
    graph = _chain([*BLOCK] * blocks, run_ms=0.0, keep_ms=1.0)
    choice = least_time(graph, 10**6, limits_peak=False)
    assert choice is not None
    assert graph.segments.boundary
    assert choice.stored.keys() == {0, *graph.segments.boundary}
    assert choice.peak_bytes == 8 + sum(BLOCK) + blocks - 1


def test_of_the_choices_with_the_least_peak_it_is_the_fastest() -> None:
    graph = _chain([1024 * nbytes for nbytes in BLOCK] * 3, run_ms=1.0, keep_ms=0.0)
    least = least_bytes(graph, limits_peak=True)
    everything_recomputed = retaining_choice(graph, {0, *graph.segments.boundary})
    assert least.peak_bytes == everything_recomputed.peak_bytes
    # The last segment is live when backward begins, stored or recomputed.
    last = [value for value, segment in enumerate(graph.segments.of_value) if segment == graph.segments.count - 1]
    assert set(last) <= least.stored.keys()


def test_what_torch_would_keep_has_a_price_too() -> None:
    graph = _chain([*BLOCK], run_ms=2.0, keep_ms=1.0)
    assert retaining_choice(graph, {0, 1, 2, 3, 4}).ms == 5.0
    choice = retaining_choice(graph, {0, 2})
    assert (choice.ms, choice.nbytes) == (2 * 1.0 + 3 * 2.0, 108)


@pytest.mark.parametrize(("shape", "expected"), [((2, 2), {0}), ((4, 1), {0, 1})])
def test_statistics_are_stored_beside_rows_that_were_coded(shape: tuple[int, ...], expected: set[int]) -> None:
    lossy = CodecOption(codec="int8", options=(), nbytes=4, encode_ms=0.0, decode_ms=0.0, error=0.01, lossless=False)
    chain = _chain([4], run_ms=0.0, keep_ms=1.0).model.kind
    values = (chain.values[0], replace(chain.values[1], shape=shape))
    graph = graph_model(replace(chain, values=values), {0: 5.0, 1: 1.0}, {0: (lossy,)}, [8, 4])
    choice = least_time(graph, 100, limits_peak=False)
    assert choice.stored[0].codec == "int8"
    assert choice.stored.keys() == expected


@st.composite
def _random_graphs(draw: st.DrawFn) -> GraphModel:
    """Draw operators that read one or two earlier values. Any value may be coarse, fine, precise or none of these."""
    drawn_operators = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0.0, 4.0)), min_size=2, max_size=4)
    )
    operators = tuple(
        Operator(
            index=j, name="", module="", inputs=tuple({a % (j + 1), b % (j + 1)}), outputs=(j + 1,), ms=ms,
            replayable=True,
        )
        for j, (a, b, ms) in enumerate(drawn_operators)
    )  # fmt: skip
    chain = _chain(
        [1024] * len(drawn_operators),
        1.0,
        0.0,
        draw(st.lists(st.booleans(), min_size=len(drawn_operators), max_size=len(drawn_operators))),
    )
    indices = range(len(drawn_operators) + 1)
    precise = frozenset(draw(st.sets(st.sampled_from(indices))))
    names = ["outlier_int4", "int8"]
    codecs = {
        value: tuple(
            CodecOption(codec=name, options=(), nbytes=nbytes, encode_ms=0.1, decode_ms=0.1, error=0.1, lossless=False)
            for name, nbytes in zip(names, (128, 256), strict=True)
            if draw(st.booleans()) and (name == "int8" or value not in precise)
        )
        for value in indices
    }
    kind = replace(chain.model.kind, operators=operators)
    return graph_model(kind, dict.fromkeys(indices, 0.05), codecs, [8, *[1024] * len(drawn_operators)], precise)


@dataclass
class _Replayed:
    """The values that a graph's backward reads if forward stores `stored`."""

    graph: GraphModel
    stored: Mapping[int, StoredForm]

    def __post_init__(self) -> None:
        pending = [value.index for value in self.graph.model.kind.values if value.saved]
        self.read: set[int] = set()
        while pending:
            value = pending.pop()
            self.read.add(value)
            pending += () if value in self.stored else self._sources(value)

    def _sources(self, value: int) -> tuple[int, ...]:
        producer = self.graph.model.kind.values[value].producer
        return () if producer is None else self.graph.model.kind.operators[producer].inputs

    @property
    def is_allowed(self) -> bool:
        values = self.graph.model.kind.values
        recomputed = self.read - self.stored.keys()
        can_be = all(values[value].recomputable and values[value].producer is not None for value in recomputed)
        return can_be and not any(self._is_coarse(value) for value in self.read & self.graph.precise)

    def _is_coarse(self, value: int) -> bool:
        """Return True if the value that backward reads comes from a coarse codec."""
        if value in self.stored:
            return self.stored[value].choice.codec == "outlier_int4"
        return any(map(self._is_coarse, self._sources(value)))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for value, store in self.stored.items() if value in self.read)

    @property
    def ms(self) -> float:
        runs = [self.graph.model.kind.operators[value - 1].ms for value in self.read - self.stored.keys()]
        return sum(store.ms for value, store in self.stored.items() if value in self.read) + sum(runs)


@given(_random_graphs(), st.integers(0, 4096))
def test_no_choice_that_is_precise_where_it_must_be_takes_less(graph: GraphModel, more_bytes: int) -> None:
    least = least_bytes(graph, limits_peak=False)
    choice = least_time(graph, least.nbytes + more_bytes, limits_peak=False)
    menus = [(None, *menu) for menu in graph.model.menus.values()]
    every = (_Replayed(graph, {v: s for v, s in enumerate(stores) if s}) for stores in itertools.product(*menus))
    allowed = [replayed for replayed in every if replayed.is_allowed]
    assert least.nbytes == min(replayed.nbytes for replayed in allowed)
    within = [replayed.ms for replayed in allowed if replayed.nbytes <= least.nbytes + more_bytes]
    assert choice.ms == pytest.approx(min(within))
    stored_options = {v: next(s for s in graph.model.menus[v] if s.choice == how) for v, how in choice.stored.items()}
    assert _Replayed(graph, stored_options).is_allowed


# Boundaries of segments.


def test_blocks_are_cut_where_little_lives() -> None:
    """Four blocks with large intermediates and small results are cut at the results."""
    kind = _chain([100, 100, 100, 1] * 4, run_ms=1.0, keep_ms=0.0).model.kind
    segments = cut_into_segments(kind, [value.nbytes for value in kind.values])
    assert segments.boundary == {4, 8, 12}
    assert segments.of_value == (0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)


def test_a_graph_with_nothing_small_in_it_stays_whole() -> None:
    kind = _chain([100, 101, 102, 103], run_ms=1.0, keep_ms=0.0).model.kind
    assert cut_into_segments(kind, [value.nbytes for value in kind.values]).count == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_no_replay_crosses_a_boundary(sizes: list[int]) -> None:
    kind = _chain(sizes, run_ms=1.0, keep_ms=0.0).model.kind
    nbytes_of_values = [value.nbytes for value in kind.values]
    segments = cut_into_segments(kind, nbytes_of_values)
    for operator in kind.operators:
        (input_value,), (output_value,) = operator.inputs, operator.outputs
        assert segments.of_value[input_value] == segments.of_value[output_value] or input_value in segments.boundary
    made_bytes = [0] * segments.count
    for value, segment in enumerate(segments.of_value):
        made_bytes[segment] += nbytes_of_values[value]
    boundary_bytes = sum(kind.values[value].nbytes for value in segments.boundary)
    assert boundary_bytes + max(made_bytes) <= sum(nbytes_of_values)
