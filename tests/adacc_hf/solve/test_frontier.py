"""The frontier against the convex hull of all plans, and the fastest plan within a limit."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, every_outcome_of

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.solve.frontier import BlockProgram
from adacc_hf.solve.milp import build_block_model

SOLVING = settings(max_examples=40, **SLOW_EXAMPLES)


def on_line(columns, nbytes):
    """Return the ms of the frontier, mixtures included, at `nbytes`."""
    if nbytes >= columns[0].nbytes:
        return 0.0
    for left, right in pairwise(columns):
        if right.nbytes <= nbytes:
            return left.ms + (right.ms - left.ms) * (left.nbytes - nbytes) / (left.nbytes - right.nbytes)
    raise AssertionError(f"a plan stores {nbytes} bytes, less than the frontier's least")


@SOLVING
@given(data=st.data())
def test_no_plan_is_better_than_the_frontier(profiles, data):
    kind = data.draw(profiles()).kinds[0]
    columns = BlockProgram(build_block_model(kind, AdaccConfig())).frontier()
    points = [(outcome.stored_bytes, outcome.overhead_ms) for _, outcome in every_outcome_of(kind)]
    assert min(nbytes for nbytes, _ in points) == columns[-1].nbytes
    for nbytes, ms in points:
        # The frontier is exact up to 1e-6 of the times, of the order of 10 ms here (frontier.SLOPE_TOLERANCE).
        assert ms >= on_line(columns, nbytes) - 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_s_frontier_bends_one_way_and_starts_with_plain(gpt2_like_profile, attention, solves):
    kind = gpt2_like_profile(attention=attention).kinds[0]
    columns = BlockProgram(build_block_model(kind, AdaccConfig())).frontier()
    assert columns[0].plan.is_plain
    slopes = [(right.ms - left.ms) / (left.nbytes - right.nbytes) for left, right in pairwise(columns)]
    assert slopes == sorted(slopes)
    assert slopes[0] > 0
    assert len(columns) > 5
    # Two runs for the least bytes. A corner takes one run that finds it, and each of its two gaps one that finds none.
    assert solves.call_count <= 2 + 2 * len(columns)


@SOLVING
@given(data=st.data())
def test_no_plan_within_a_limit_is_faster(profiles, data):
    kind = data.draw(profiles()).kinds[0]
    program = BlockProgram(build_block_model(kind, AdaccConfig()))
    points = [(outcome.stored_bytes, outcome.overhead_ms) for _, outcome in every_outcome_of(kind)]
    least = min(nbytes for nbytes, _ in points)
    limit = data.draw(st.sampled_from([nbytes for nbytes, _ in points]))
    plan = program.fastest_within(max(least, limit))
    assert plan.nbytes <= max(least, limit)
    # Times are multiples of 1/8: any plan but the fastest differs by 0.125.
    assert plan.ms == pytest.approx(min(ms for nbytes, ms in points if nbytes <= limit), abs=1e-9)


def test_what_the_relaxation_divides_is_decided_by_an_integer_program(tape_builder, make_codec):
    """An integer program decides a plan that the relaxation divides. With half of the input coded and half retained,
    half of a value could be recomputed that a coded input forbids."""
    tape = tape_builder()
    start = tape.value("input", 12, codecs=(make_codec("int4", 4, 0.0, 0.0),))
    (exactness_dependents,) = tape.operator("first", [start], [("exactness_dependents", 4)], 1.0, save=[-1])
    tape.operator("second", [start], [("other", 8)], 1.0, save=[-1])
    tape.values[exactness_dependents]["replay_error"] = 1.0
    kind = tape.kind()
    columns = BlockProgram(build_block_model(kind, AdaccConfig())).frontier()
    points = [(outcome.stored_bytes, outcome.overhead_ms) for _, outcome in every_outcome_of(kind)]
    assert columns[-1].nbytes == min(nbytes for nbytes, _ in points) == 8
    assert all(ms >= on_line(columns, nbytes) - 1e-9 for nbytes, ms in points)
