"""Integer program that decides which forward values a compiled graph stores for its backward, and in which form.

The integer program of `solve.milp`, made for blocks that run eagerly, is applied to one graph. A compiled graph can
store any forward value, but a block only the values that autograd saves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.artifacts.kind_profile import CodecOption, KindProfile
from adacc_hf.artifacts.policy import RETAIN, Choice
from adacc_hf.kernels.codecs import PRECISE
from adacc_hf.solve.linear_program import LinearProgram, Solver, Terms
from adacc_hf.solve.milp import BlockVariables, KindModel, StoredForm


@dataclass(frozen=True, kw_only=True)
class GraphChoice:
    """Solution of the integer program for one compiled graph: the stored values and the cost."""

    stored: Mapping[int, Choice]
    """Choice (retain or a codec) for each stored value. All other values that backward needs are recomputed."""
    stored_bytes: Mapping[int, int]
    """Bytes of each stored value."""
    nbytes: int
    peak_bytes: int
    """Maximum of the live bytes while a segment is recomputed: the values stored up to the segment's end, and its
    recomputed values."""
    ms: float


@dataclass(frozen=True)
class GraphModel:
    """Input of the integer program for one compiled graph."""

    model: KindModel
    segments: Segments
    live_bytes: tuple[int, ...]
    """Bytes that each value takes while its segment is recomputed, 0 if Inductor fuses it with all its readers."""
    precise: Set[int] = frozenset()
    """Values that must not be recomputed from a value stored by a codec coarser than the precise one (INT8)."""

    def is_coarse(self, value: int, option: int) -> bool:
        """Return True if form number `option` of `value` is a codec that is coarser than the precise codec (INT8)."""
        store = self.model.menus[value][option]
        return not store.is_lossless and store.choice.codec != PRECISE


def graph_model(
    kind: KindProfile,
    keep_ms: Mapping[int, float],
    codecs: Mapping[int, tuple[CodecOption, ...]],
    live_bytes: Sequence[int],
    precise: Set[int] = frozenset(),
) -> GraphModel:
    """Return the integer program's input, in which each value can be retained, compressed or recomputed. `keep_ms`
    contains the time to retain each value, and `codecs` the codecs that may compress the value. `live_bytes` and
    `precise` are the fields of `GraphModel`."""
    menus = {
        value.index: (
            StoredForm(RETAIN, value.nbytes, keep_ms[value.index]),
            *(
                StoredForm(Choice.compress(option), option.nbytes, option.encode_ms + option.decode_ms, option.lossless)
                for option in codecs.get(value.index, ())
            ),
        )
        for value in kind.values
    }
    runnable = frozenset(operator.index for operator in kind.operators if operator.replayable)
    segments = cut_into_segments(kind, live_bytes)
    # Values that live across a boundary are never recomputed. If they are needed, they are stored.
    values = tuple(replace(v, recomputable=v.recomputable and v.index not in segments.boundary) for v in kind.values)
    cut = replace(kind, values=values)
    model = KindModel(profiled_kind=cut, kind=cut, menus=menus, runnable=runnable)
    return GraphModel(model, segments, tuple(live_bytes), precise)


class _GraphProgram:
    """Integer program of one graph. Bytes are counted in KiB, to keep the coefficients well scaled."""

    def __init__(self, graph: GraphModel) -> None:
        self._graph = graph
        self.program = LinearProgram()
        self.block = BlockVariables(self.program, graph.model)
        self._constrain_precise()

    def bound(self, cap_bytes: int, *, limits_peak: bool) -> None:
        """Limit the stored bytes to `cap_bytes`. If `limits_peak`, limit the live bytes during recomputation to
        `cap_bytes` too."""
        high = (cap_bytes + 0.5) / 1024  # half a byte absorbs rounding errors in both directions
        self.program.constrain(self.block.terms_bytes(1 / 1024), high=high)
        for segment in range(self._graph.segments.count if limits_peak else 0):
            self.program.constrain(self.segment_bytes(segment), high=high)

    def _constrain_precise(self) -> None:
        """Add the constraints [Precise]: a precise value is never recomputed from a value stored by a coarse codec. The
        variable `coarse[v]` is 1 if replays read value v with a coarse codec's error. That is so if a coarse codec
        stores v, or if v is recomputed from a value with such an error."""
        model = self._graph.model
        coarse: dict[int, int] = {}
        _, upstream = walk_back(self._graph.precise, self._recomputed_from)
        for value in sorted(upstream):
            options = {
                self.block.store[value, o]: self._graph.is_coarse(value, o) for o in range(len(model.menus[value]))
            }
            fine_terms = [(variable, 1.0) for variable, is_coarse in options.items() if not is_coarse]
            coarse_terms = [(variable, -1.0) for variable, is_coarse in options.items() if is_coarse]
            reads = [coarse[read] for read in self._recomputed_from(value) if read in coarse]
            own: list[tuple[int, float]] = []
            if value not in self._graph.precise and (coarse_terms or reads):
                coarse[value] = self.program.variable()
                own = [(coarse[value], 1.0)]
                self.program.constrain([*own, *coarse_terms], low=0.0)
            operator = model.recompute(value)
            if operator is None:  # a value without an operator reads nothing
                continue
            run = self.block.run[operator]
            for read in reads:
                self.program.constrain([*own, *fine_terms, (read, -1.0), (run, -1.0)], low=-1.0)

    def _recomputed_from(self, value: int) -> tuple[int, ...]:
        operator = self._graph.model.recompute(value)
        return () if operator is None else self._graph.model.kind.operators[operator].inputs

    def peak(self) -> int:
        """Add and return a variable for the peak in whole KiB: an upper bound of the live bytes in every segment (part
        of the graph)."""
        most_stored = sum(max(store.nbytes for store in menu) for menu in self._graph.model.menus.values())
        peak = self.program.variable(upper=float((most_stored + sum(self._graph.live_bytes)) // 1024 + 1))
        for segment in range(self._graph.segments.count):
            self.program.constrain([*self.segment_bytes(segment), (peak, -1.0)], high=0.0)
        return peak

    def best(self, costs: Terms) -> GraphChoice | None:
        solution = Solver(self.program, integer=True).minimize(costs)
        if solution is None:
            return None
        menus = self._graph.model.menus
        stored = {v: menus[v][option] for (v, option), x in self.block.store.items() if solution[x] > 0.5}
        return _graph_choice(self._graph, stored)

    def segment_bytes(self, segment: int) -> list[tuple[int, float]]:
        """Return the live KiB while a segment is recomputed, as terms of the integer program."""
        of_value = self._graph.segments.of_value
        stored = [
            (variable, self._graph.model.menus[value][option].nbytes / 1024)
            for (value, option), variable in self.block.store.items()
            if of_value[value] <= segment
        ]
        recomputed = [
            (self.block.run[record.producer], self._graph.live_bytes[record.index] / 1024)
            for record in self._graph.model.kind.values
            if of_value[record.index] == segment and record.producer in self.block.run
        ]
        return stored + recomputed


def least_time(graph: GraphModel, cap_bytes: int, *, limits_peak: bool) -> GraphChoice | None:
    """Return the fastest choice that stores at most `cap_bytes`, or None if no choice stores so little. If
    `limits_peak`, `cap_bytes` also limits the live bytes while a segment is recomputed."""
    program = _GraphProgram(graph)
    program.bound(cap_bytes, limits_peak=limits_peak)
    return program.best(program.block.terms_ms())


def least_bytes(graph: GraphModel, *, limits_peak: bool) -> GraphChoice:
    """Return the fastest choice with the least stored bytes or, if `limits_peak`, with the least peak. The program is
    solved twice, for the least bytes and then for the least time. The second solve removes useless replays, which take
    time and need temporaries that the program does not count."""
    program = _GraphProgram(graph)
    costs = [(program.peak(), 1.0)] if limits_peak else program.block.terms_bytes(1 / 1024)
    least = program.best(costs)
    assert least is not None, "storing everything is always a solution"
    return least_time(graph, least.peak_bytes if limits_peak else least.nbytes, limits_peak=limits_peak) or least


def retaining_choice(graph: GraphModel, values: Iterable[int]) -> GraphChoice:
    """Return the choice that retains `values` and recomputes all other values that backward needs."""
    return _graph_choice(graph, {value: graph.model.menus[value][0] for value in values})


def _graph_choice(graph: GraphModel, forms: Mapping[int, StoredForm]) -> GraphChoice:
    """Return the choice that stores each value of `forms` in the form that `forms` gives, with the choice's cost.
    Values that nothing reads are left out."""
    model = graph.model
    runs: set[int] = set()

    def reads(value: int) -> tuple[int, ...] | None:
        if value in forms:
            return None
        producer = model.kind.values[value].producer
        if producer is None or producer in runs:
            return ()
        runs.add(producer)
        return model.kind.operators[producer].inputs

    saved = [value.index for value in model.kind.values if value.saved]
    read, _ = walk_back(saved, reads)
    stores = {value: store for value, store in forms.items() if value in read}
    replay_ms = sum(model.kind.operators[j].ms for j in runs)
    stored_bytes = {value: store.nbytes for value, store in stores.items()}
    return GraphChoice(
        stored={value: store.choice for value, store in stores.items()},
        stored_bytes=stored_bytes,
        nbytes=sum(stored_bytes.values()),
        peak_bytes=_peak_bytes(graph, stored_bytes, runs),
        ms=replay_ms + sum(store.ms for store in stores.values()),
    )


def _peak_bytes(graph: GraphModel, stored_bytes: Mapping[int, int], runs: Set[int]) -> int:
    """Return the maximum of the live bytes while a segment (part of the graph) is recomputed."""
    stored, recomputed = [0] * graph.segments.count, [0] * graph.segments.count
    for value, segment in enumerate(graph.segments.of_value):
        stored[segment] += stored_bytes.get(value, 0)
        if graph.model.kind.values[value].producer in runs:
            recomputed[segment] += graph.live_bytes[value]
    return max(map(sum, zip(accumulate(stored), recomputed, strict=True)))


# Segments of a long graph. A graph recomputes each value once, when backward first needs it, and holds the value until
# its last reader has run. Without limits, the first recomputation could run and hold the whole forward, with a higher
# peak than plain training. So a graph is cut into segments. Values that live across a boundary are never recomputed,
# and at most one segment is recomputed at a time.

NUM_SIZES = 24
"""Number of limits on the size of a segment that `cut_into_segments` tries."""


@dataclass(frozen=True)
class Segments:
    """Partition of a compiled graph's forward into consecutive segments. Backward recomputes one segment at a time."""

    of_value: tuple[int, ...]
    """Number of the segment that computes each value, counted from the start of forward."""
    boundary: frozenset[int]
    """Values that one segment computes and a later segment reads."""

    @property
    def count(self) -> int:
        return max(self.of_value, default=0) + 1


def cut_into_segments(kind: KindProfile, value_bytes: Sequence[int]) -> Segments:
    """Cut a graph into segments such that the least memory is needed: the bytes stored at all boundaries, plus the
    bytes of the largest segment. `value_bytes` contains the bytes that each value takes while its segment is
    recomputed."""
    producer_positions = [value.producer or 0 for value in kind.values]
    live = _live_across(kind, producer_positions)
    live_bytes = [sum(kind.values[value].nbytes for value in values) for values in live]
    positions = _local_minima(live_bytes)
    bytes_at = [0] * (len(live) + 1)
    for value, position in enumerate(producer_positions):
        bytes_at[position] += value_bytes[value]
    cumulative = [0]
    for nbytes in bytes_at:
        cumulative.append(cumulative[-1] + nbytes)
    total = cumulative[-1]
    best: tuple[int, tuple[int, ...]] = (total, ())
    for step in range(1, NUM_SIZES + 1):
        # Limits in a geometric sequence, from half the graph down to a few operators.
        limit = total * 0.75 ** (2 * step)
        boundaries = _cheapest_boundaries(positions, live_bytes, cumulative, limit)
        if boundaries is not None:
            edges = [0, *(position + 1 for position in boundaries), len(cumulative) - 1]
            largest = max(cumulative[end] - cumulative[start] for start, end in pairwise(edges))
            best = min(best, (largest + sum(live_bytes[p] for p in boundaries), boundaries))
    best_boundaries = list(best[1])
    return Segments(
        of_value=tuple(bisect_left(best_boundaries, position) for position in producer_positions),
        boundary=frozenset(value for p in best_boundaries for value in live[p]),
    )


def _live_across(kind: KindProfile, producer_positions: Sequence[int]) -> list[list[int]]:
    """Return, for each operator, the values that are live after the operator and read later in forward. Values computed
    only from parameters are left out, because they can be recomputed in any segment."""
    last_read = list(producer_positions)
    for operator in kind.operators:
        for value in operator.inputs:
            last_read[value] = max(last_read[value], operator.index)
    live: list[list[int]] = [[] for _ in kind.operators]
    for record in kind.values:
        if record.role != "parameter":
            for position in range(producer_positions[record.index], last_read[record.index]):
                live[position].append(record.index)
    return live


def _local_minima(live_bytes: Sequence[int]) -> list[int]:
    last = len(live_bytes) - 1
    return [
        position
        for position in range(last)
        if live_bytes[position] < live_bytes[position + 1]
        and (position == 0 or live_bytes[position] <= live_bytes[position - 1])
    ]


def _cheapest_boundaries(
    positions: Sequence[int], live_bytes: Sequence[int], cumulative: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """Return the boundaries that cut a graph into segments of at most `limit` bytes, with the least bytes stored at the
    boundaries. Return None if this is impossible. `positions` are the possible boundaries, `live_bytes` the bytes
    stored at each of them, and `cumulative` the bytes of all operators before each position."""
    last = len(cumulative) - 1
    # Dynamic program: least cost of a chain of boundaries ending at each position, and the chain's previous boundary.
    cost: list[float] = []
    previous: list[int] = []
    for index, position in enumerate(positions):
        starts = [(0.0, -1)] if cumulative[position + 1] <= limit else []
        for earlier in range(index - 1, -1, -1):
            if cumulative[position + 1] - cumulative[positions[earlier] + 1] > limit:
                break
            starts.append((cost[earlier], earlier))
        least, source = min(starts, default=(float("inf"), -1))
        cost.append(least + live_bytes[position])
        previous.append(source)
    ends = [(cost[index], index) for index, p in enumerate(positions) if cumulative[last] - cumulative[p + 1] <= limit]
    least, index = min(ends, default=(float("inf"), -1))
    if least == float("inf"):
        return None
    chain = []
    while index >= 0:
        chain.append(positions[index])
        index = previous[index]
    return tuple(reversed(chain))
