"""Which forward values a compiled graph hands to its backward, and in which form: the program of `milp` on one graph.

Unlike the executor, a graph can hand over any value, not only what autograd would save.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.artifacts.policy import RETAIN, Choice
from adacc_hf.artifacts.profile import CodecOption, KindProfile
from adacc_hf.kernels.codecs import precise_codec
from adacc_hf.solve.linear_program import LinearProgram, Solver, SolverLog, Terms
from adacc_hf.solve.milp import BlockVariables, KindModel, StoredForm, lossy_values


@dataclass(frozen=True, kw_only=True)
class GraphChoice:
    """What backward gets."""

    stored: Mapping[int, Choice]
    """How each handed-over value is stored; what is not here and needed is recomputed."""
    stored_bytes: Mapping[int, int]
    """What each of them takes."""
    nbytes: int
    peak_bytes: int
    """Most that is live while a segment is recomputed: what is stored up to it, and what is recomputed of it."""
    ms: float
    """Replay, storing and codecs."""


@dataclass(frozen=True)
class GraphModel:
    """The program's data for one graph."""

    model: KindModel
    segments: Segments
    live_bytes: tuple[int, ...]
    """What each value takes while its segment is recomputed."""
    precise: Set[int] = frozenset()
    """Values that are recomputed of nothing that a coarse codec left."""

    def is_coarse(self, value: int, option: int) -> bool:
        """Whether that way to store a value leaves less of it than the precise codec would."""
        store = self.model.menus[value][option]
        return not store.is_lossless and store.choice.codec != precise_codec()


def graph_model(
    kind: KindProfile,
    keep_ms: Mapping[int, float],
    codecs: Mapping[int, tuple[CodecOption, ...]],
    live_bytes: Sequence[int],
    precise: Set[int] = frozenset(),
) -> GraphModel:
    """The choices there are: keep each value, for the time that takes, code it, or run its operator again."""
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
    # What lives across a boundary is never recomputed: whatever needs it has it stored.
    values = tuple(replace(v, recomputable=v.recomputable and v.index not in segments.boundary) for v in kind.values)
    cut = replace(kind, values=values)
    # A graph can hand over any index, not only what backward reads.
    kept = replace(cut, values=tuple(replace(value, saved=True) for value in values)).index_values(lossy_values(menus))
    model = KindModel(whole=cut, kind=cut, menus=menus, runnable=runnable, index_values=kept)
    return GraphModel(model, segments, tuple(live_bytes), precise)


class _GraphProgram:
    """The program of one graph, in KiB so that coefficients are of ordinary size."""

    def __init__(self, graph: GraphModel) -> None:
        self._graph = graph
        self.program = LinearProgram()
        self.block = BlockVariables(self.program, graph.model)
        self._keep_precise()

    def bound(self, cap_bytes: int, *, of_peak: bool) -> None:
        """Allow at most `cap_bytes` to be stored; with `of_peak` to be live while any segment is recomputed."""
        high = (cap_bytes + 0.5) / 1024  # half a byte keeps rounding away from both sides
        self.program.constrain(self.block.terms_bytes(1 / 1024), high=high)
        for segment in range(self._graph.segments.count if of_peak else 0):
            self.program.constrain(self.segment_bytes(segment), high=high)

    def _keep_precise(self) -> None:
        """[Precise] no replay that starts at what a coarse codec left ends in a precise value.

        `coarse[v]` is 1 where v, as replays read it, comes from such a codec: that stores v, or what v is recomputed
        from.
        """
        model = self._graph.model
        coarse: dict[int, int] = {}
        _, upstream = walk_back(self._graph.precise, self._recomputed_from)
        for value in sorted(upstream):
            options = {
                self.block.store[value, o]: self._graph.is_coarse(value, o) for o in range(len(model.menus[value]))
            }
            fine = [(variable, 1.0) for variable, is_coarse in options.items() if not is_coarse]
            stored = [(variable, -1.0) for variable, is_coarse in options.items() if is_coarse]
            reads = [coarse[read] for read in self._recomputed_from(value) if read in coarse]
            own: list[tuple[int, float]] = []
            if value not in self._graph.precise and (stored or reads):
                coarse[value] = self.program.variable()
                own = [(coarse[value], 1.0)]
                self.program.constrain([*own, *stored], low=0.0)
            operator = model.recompute(value)
            if operator is None:  # it reads nothing
                continue
            run = self.block.run[operator]
            for read in reads:
                self.program.constrain([*own, *fine, (read, -1.0), (run, -1.0)], low=-1.0)

    def _recomputed_from(self, value: int) -> tuple[int, ...]:
        operator = self._graph.model.recompute(value)
        return () if operator is None else self._graph.model.kind.operators[operator].inputs

    def peak(self) -> int:
        """A variable, in whole KiB, that is no less than what is live while any segment is recomputed."""
        everything = sum(max(store.nbytes for store in menu) for menu in self._graph.model.menus.values())
        peak = self.program.variable(upper=float((everything + sum(self._graph.live_bytes)) // 1024 + 1))
        for segment in range(self._graph.segments.count):
            self.program.constrain([*self.segment_bytes(segment), (peak, -1.0)], high=0.0)
        return peak

    def best(self, costs: Terms, log: SolverLog) -> GraphChoice | None:
        """The choice with least `costs`; None if there is none."""
        solution = Solver(self.program, log, integer=True).minimize(costs)
        if solution is None:
            return None
        menus = self._graph.model.menus
        taken = {v: menus[v][option] for (v, option), x in self.block.store.items() if solution[x] > 0.5}
        return _choice(self._graph, taken)

    def segment_bytes(self, segment: int) -> list[tuple[int, float]]:
        """What is live, in KiB, while a segment is recomputed: what is stored up to it, and what is recomputed of
        it."""
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


def least_time(graph: GraphModel, cap_bytes: int, log: SolverLog, *, of_peak: bool) -> GraphChoice | None:
    """The fastest choice that stores at most `cap_bytes`; None if there is none.

    With `of_peak`, what is recomputed of a segment counts too, with what is stored up to it.
    """
    program = _GraphProgram(graph)
    program.bound(cap_bytes, of_peak=of_peak)
    return program.best(program.block.terms_ms(), log)


def least_bytes(graph: GraphModel, log: SolverLog, *, of_peak: bool) -> GraphChoice:
    """The fastest of the choices that store least, or with `of_peak` of those that have least live at any time.

    What is recomputed for nothing would not only take time: it has temporaries, which a peak of segments leaves out.
    """
    program = _GraphProgram(graph)
    costs = [(program.peak(), 1.0)] if of_peak else program.block.terms_bytes(1 / 1024)
    least = program.best(costs, log)
    assert least is not None, "keeping everything is always a solution"
    return least_time(graph, least.peak_bytes if of_peak else least.nbytes, log, of_peak=of_peak) or least


def keeping(graph: GraphModel, values: Iterable[int]) -> GraphChoice:
    """The choice that keeps `values` as they are and recomputes the others."""
    return _choice(graph, {value: graph.model.menus[value][0] for value in values})


def _choice(graph: GraphModel, taken: Mapping[int, StoredForm]) -> GraphChoice:
    """The choice that stores what is `taken`, less what nobody reads."""
    model = graph.model
    runs: set[int] = set()

    def reads(value: int) -> tuple[int, ...] | None:
        if value in taken:
            return None
        producer = model.kind.values[value].producer
        if producer is None or producer in runs:
            return ()
        runs.add(producer)
        return model.kind.operators[producer].inputs

    saved = [value.index for value in model.kind.values if value.saved]
    read, _ = walk_back(saved, reads)
    stores = {value: store for value, store in taken.items() if value in read}
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
    """Most that is live while a segment is recomputed."""
    stored, recomputed = [0] * graph.segments.count, [0] * graph.segments.count
    for value, segment in enumerate(graph.segments.of_value):
        stored[segment] += stored_bytes.get(value, 0)
        if graph.model.kind.values[value].producer in runs:
            recomputed[segment] += graph.live_bytes[value]
    return max(map(sum, zip(accumulate(stored), recomputed, strict=True)))


# Where a long graph is cut into segments whose replay ends at what is stored. A graph recomputes each value once, as
# soon as backward asks for one that needs it, and holds it until its last reader is through. Without limits, the first
# such question could have the whole forward recomputed and held at once, at more than plain training's peak. So what
# lives across a boundary is always stored, and one segment at most is recomputed at a time.

NUM_SIZES = 24
"""Sizes of the largest segment that are tried."""


@dataclass(frozen=True)
class Segments:
    """How a graph is cut."""

    of_value: tuple[int, ...]
    """For each value the number of the segment that makes it, counted from the start of forward."""
    boundary: frozenset[int]
    """Values that live across a boundary."""

    @property
    def count(self) -> int:
        return max(self.of_value, default=0) + 1


def cut_into_segments(kind: KindProfile, value_bytes: Sequence[int]) -> Segments:
    """The boundaries for which their bytes, with those of the largest segment between two, are least.

    `value_bytes` are what recomputing each value takes while its segment is recomputed.
    """
    made_at = _making_positions(kind)
    live = _live_across(kind, made_at)
    live_bytes = [sum(kind.values[value].nbytes for value in values) for values in live]
    positions = _local_minima(live_bytes)
    made_bytes = [0] * (len(live) + 1)
    for value, position in enumerate(made_at):
        made_bytes[position] += value_bytes[value]
    before = [0]
    for nbytes in made_bytes:
        before.append(before[-1] + nbytes)
    total = before[-1]
    best: tuple[int, tuple[int, ...]] = (total, ())
    for step in range(1, NUM_SIZES + 1):
        # Geometric: from half the graph down to a few operators.
        limit = total * 0.75 ** (2 * step)
        found = _cheapest(positions, live_bytes, before, limit)
        if found is not None:
            largest = _largest_segment(found, before)
            best = min(best, (largest + sum(live_bytes[p] for p in found), found))
    boundaries = list(best[1])
    return Segments(
        of_value=tuple(bisect_left(boundaries, position) for position in made_at),
        boundary=frozenset(value for p in boundaries for value in live[p]),
    )


def _making_positions(kind: KindProfile) -> list[int]:
    """For each value the operator that makes it; what is given is there from the start."""
    return [0 if value.producer is None else value.producer for value in kind.values]


def _live_across(kind: KindProfile, made_at: Sequence[int]) -> list[list[int]]:
    """For each operator the values that live when it has run, and that forward reads later.

    What comes of parameters alone can be recomputed at any place.
    """
    last_read = list(made_at)
    for operator in kind.operators:
        for value in operator.inputs:
            last_read[value] = max(last_read[value], operator.index)
    live: list[list[int]] = [[] for _ in kind.operators]
    for record in kind.values:
        if record.role != "parameter":
            for position in range(made_at[record.index], last_read[record.index]):
                live[position].append(record.index)
    return live


def _local_minima(live_bytes: Sequence[int]) -> list[int]:
    """Operators after which no more bytes live than after their neighbours; the last of equal ones."""
    last = len(live_bytes) - 1
    return [
        position
        for position in range(last)
        if live_bytes[position] < live_bytes[position + 1]
        and (position == 0 or live_bytes[position] <= live_bytes[position - 1])
    ]


def _cheapest(
    positions: Sequence[int], live_bytes: Sequence[int], before: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """The boundaries with least bytes among those that leave no segment above `limit`; None if there are none."""
    last = len(before) - 1
    # Least cost of a chain of boundaries that ends at each position, and the one before it in that chain.
    cost: list[float] = []
    previous: list[int] = []
    for index, position in enumerate(positions):
        starts = [(0.0, -1)] if before[position + 1] <= limit else []
        for earlier in range(index - 1, -1, -1):
            if before[position + 1] - before[positions[earlier] + 1] > limit:
                break
            starts.append((cost[earlier], earlier))
        least, source = min(starts, default=(float("inf"), -1))
        cost.append(least + live_bytes[position])
        previous.append(source)
    ends = [(cost[index], index) for index, p in enumerate(positions) if before[last] - before[p + 1] <= limit]
    least, index = min(ends, default=(float("inf"), -1))
    if least == float("inf"):
        return None
    chain = []
    while index >= 0:
        chain.append(positions[index])
        index = previous[index]
    return tuple(reversed(chain))


def _largest_segment(boundaries: Sequence[int], before: Sequence[int]) -> int:
    edges = [0, *(position + 1 for position in boundaries), len(before) - 1]
    return max(before[end] - before[start] for start, end in pairwise(edges))
