"""The frontier against the convex hull of all plans, and its chain of policies."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, every_outcome_of

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.solve.frontier import chain, frontiers
from adacc_hf.solve.linear_program import SolverLog
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
    (columns,) = frontiers(SolverLog(), [build_block_model(kind, AdaccConfig())])
    points = [(outcome.stored_bytes, outcome.overhead_ms) for _, outcome in every_outcome_of(kind)]
    assert min(nbytes for nbytes, _ in points) == columns[-1].nbytes
    for nbytes, ms in points:
        # The frontier is exact up to 1e-6 of the times, of the order of 10 ms here (frontier.SLOPE_TOLERANCE).
        assert ms >= on_line(columns, nbytes) - 1e-4
    for column in columns:
        outcome = run_block(kind, column.plan)
        assert (outcome.stored_bytes, outcome.shared) == (column.nbytes, column.shared)
        # Sums of few terms in another order.
        assert outcome.overhead_ms == pytest.approx(column.ms, abs=1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_s_frontier_bends_one_way_and_starts_with_plain(gpt2_like_profile, attention):
    kind = gpt2_like_profile(attention=attention).kinds[0]
    log = SolverLog()
    (columns,) = frontiers(log, [build_block_model(kind, AdaccConfig())])
    assert columns[0].plan.is_plain
    slopes = [(right.ms - left.ms) / (left.nbytes - right.nbytes) for left, right in pairwise(columns)]
    assert slopes == sorted(slopes)
    assert slopes[0] > 0
    assert len(columns) > 5
    # Two runs for the least bytes. A corner takes one run that finds it, and each of its two gaps one that finds none.
    assert log.num_solves <= 2 + 2 * len(columns)


def test_the_chain_changes_one_block_at_a_time_and_the_first_ones_first(gpt2_like_profile):
    models = [build_block_model(gpt2_like_profile(attention=a).kinds[0], AdaccConfig()) for a in ("sdpa", "eager")]
    columns = frontiers(SolverLog(), models)
    kinds = [0, 1, 1, 0, 0]
    policies = list(chain(kinds, columns))
    assert policies[0] == [columns[kind][0] for kind in kinds]
    assert policies[-1] == [columns[kind][-1] for kind in kinds]
    slopes = []
    for before, after in pairwise(policies):
        changed_blocks = [i for i in range(5) if before[i] is not after[i]]
        assert len(changed_blocks) == 1
        left, right = before[changed_blocks[0]], after[changed_blocks[0]]
        slopes.append((right.ms - left.ms) / (left.nbytes - right.nbytes))
    assert slopes == sorted(slopes)
    for policy in policies:
        for kind in (0, 1):
            stored_bytes = [column.nbytes for column, k in zip(policy, kinds, strict=True) if k == kind]
            assert stored_bytes == sorted(stored_bytes)


def test_what_the_relaxation_divides_is_decided_by_an_integer_program(tape_builder, make_codec):
    """An integer program decides a plan that the relaxation divides. With half of the input coded and half retained,
    half of a value could be recomputed that a coded input forbids."""
    tape = tape_builder()
    start = tape.value("input", 12, codecs=(make_codec("int4", 4, 0.0, 0.0),))
    (exactness_dependents,) = tape.operator("first", [start], [("exactness_dependents", 4)], 1.0, save=[-1])
    tape.operator("second", [start], [("other", 8)], 1.0, save=[-1])
    tape.values[exactness_dependents]["replay_error"] = 1.0
    kind = tape.kind()
    (columns,) = frontiers(SolverLog(), [build_block_model(kind, AdaccConfig())])
    points = [(outcome.stored_bytes, outcome.overhead_ms) for _, outcome in every_outcome_of(kind)]
    assert columns[-1].nbytes == min(nbytes for nbytes, _ in points) == 8
    assert all(ms >= on_line(columns, nbytes) - 1e-9 for nbytes, ms in points)
