"""The solver: budgets are met to the byte, more budget costs no time, an impossible budget names the least one."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_builders import SLOW_EXAMPLES, bytes_of_step, every_outcome_of

from adacc_hf.artifacts.block_outcome import run_block
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.memory_simulator import simulate, simulate_blocks
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.solve import linear_program
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import infeasible_budget, least_policy, solve_policy

SOLVING = settings(max_examples=40, **SLOW_EXAMPLES)
MS_ROUNDING = 1e-9
"""Tolerance for sums of fewer than 10^4 terms of the order of 1 ms, each with a relative error of 1e-16."""

ROUGHLY = 1.01
"""Most overhead within a larger budget, relative to a smaller one. The search is not exact: it found policies of three
small blocks that took 0.5 % longer."""


@SOLVING
@given(data=st.data())
def test_peak_budgets_hold_and_their_floor_is_exact(profiles, data):
    profile = data.draw(profiles(num_kinds=data.draw(st.integers(1, 2)), max_blocks=3))
    plain_bytes = uniform_policy(profile, "retain").predicted_peak_bytes
    try:
        policy = solve_policy(profile, 1)
    except InfeasibleBudgetError as error:
        floor = error.smallest_budget_bytes
    previous_ms = float("inf")
    for budget in sorted({floor, *(floor + (plain_bytes - floor) * i // 5 for i in range(6))}):
        policy = solve_policy(profile, budget)
        assert policy.predicted_peak_bytes <= budget
        assert policy.predicted_overhead_ms <= ROUGHLY * previous_ms
        previous_ms = policy.predicted_overhead_ms
    assert policy.is_plain
    with pytest.raises(InfeasibleBudgetError):
        solve_policy(profile, floor - 1)


def test_a_failed_search_keeps_nothing_of_its_callers(gpt2_like_profile):
    """A failed search keeps no reference to its caller's frames, which may hold a step's tensors. An error that its own
    frame refers to would live until garbage collection."""

    class Tensor:
        pass

    def caller():
        tensor = Tensor()
        # Not pytest.raises, which keeps the frame.
        try:
            solve_policy(profile, 1)
        except InfeasibleBudgetError:
            return weakref.ref(tensor)
        raise AssertionError("a budget of one byte was met")

    profile = gpt2_like_profile()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_blocks", [2, 12, 48])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_at_every_budget(gpt2_like_profile, attention, num_blocks, solves):
    profile = gpt2_like_profile(num_blocks=num_blocks, attention=attention)
    with pytest.raises(InfeasibleBudgetError) as error:
        solve_policy(profile, 1e-6)
    floor = error.value.smallest_budget_bytes / profile.plain_stored_bytes
    previous_ms = float("inf")
    for fraction in (floor, *(part / 16 for part in range(1, 17) if part / 16 > floor)):
        solves.reset_mock()
        policy = solve_policy(profile, fraction)
        # The floor as a fraction is rounded to a float.
        assert policy.predicted_stored_bytes <= round(fraction * profile.plain_stored_bytes)
        assert policy.predicted_overhead_ms <= ROUGHLY * previous_ms
        previous_ms = policy.predicted_overhead_ms
        # 28 to 60 programs take 0.1 to 0.3 s on two idle cores; the paper's 0.5 s is for an idle machine too.
        assert solves.call_count <= 80
    assert policy.is_plain


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_within_a_peak(gpt2_like_profile, attention):
    profile = gpt2_like_profile(num_blocks=12, attention=attention)
    plain_bytes = uniform_policy(profile, "retain").predicted_peak_bytes
    message = r'memory_budget=1, which may have been meant as 1\.0, .* or "1GiB", is below the least possible peak'
    with pytest.raises(InfeasibleBudgetError, match=message) as error:
        solve_policy(profile, 1)
    floor = error.value.smallest_budget_bytes
    previous_ms = float("inf")
    for i in range(9):
        budget = floor + (plain_bytes - floor) * i // 8
        policy = solve_policy(profile, budget)
        # One block's step along the frontier is at most 4 % of all stored bytes here; a quarter of it is left unused.
        assert 0.985 * budget <= policy.predicted_peak_bytes <= budget
        assert policy.predicted_overhead_ms <= ROUGHLY * previous_ms
        previous_ms = policy.predicted_overhead_ms
    assert policy.is_plain


def test_many_kinds_take_bounded_time_and_come_close_to_one(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=8, attention="eager")
    kinds = tuple(replace(profile.kinds[0], digest=f"kind{i}") for i in range(8))
    blocks = tuple(replace(block, kind=i) for i, block in enumerate(profile.blocks))
    many = replace(profile, kinds=kinds, blocks=blocks)
    previous_ms = float("inf")
    for fraction in (0.1, 0.25, 0.4, 0.41, 0.42, 0.5, 0.8):
        one_ms = solve_policy(profile, fraction).predicted_overhead_ms
        policy = solve_policy(many, fraction)
        assert policy.predicted_stored_bytes <= fraction * profile.plain_stored_bytes
        # At most a fifth of one block's step along the frontier is lost: at 8 blocks less than 3 %.
        assert policy.predicted_overhead_ms <= 1.03 * one_ms
        assert policy.predicted_overhead_ms <= ROUGHLY * previous_ms
        previous_ms = policy.predicted_overhead_ms


def test_first_blocks_store_less(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=12)
    policy = solve_policy(profile, 0.5)
    stored_bytes = [run_block(profile.kinds[0], policy.plan_of(block.name)).stored_bytes for block in profile.blocks]
    assert stored_bytes[0] < stored_bytes[-1]
    assert simulate(profile, [policy.plan_of(block.name) for block in profile.blocks]).stored_bytes < (
        profile.plain_stored_bytes / 2
    )


def test_a_budget_that_everything_fits_changes_nothing(gpt2_like_profile, solves):
    profile = gpt2_like_profile(num_blocks=2)
    for budget in (1.0, "1TiB", 1 << 50, "auto"):
        policy = solve_policy(profile, budget)
        assert policy.is_plain
        assert dict(policy.facts)["status"] == "plain"
    assert not solves.called


def test_auto_leaves_the_margin_free(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=12)
    peak = uniform_policy(profile, "retain").predicted_peak_bytes
    tight = replace(profile, available_bytes=peak)
    assert solve_policy(tight, "auto", AdaccConfig(memory_margin=0.0)).is_plain
    policy = solve_policy(tight, config=AdaccConfig(memory_margin=0.25))
    assert not policy.is_plain
    assert policy.predicted_peak_bytes <= 0.75 * peak


def test_the_config_limits_the_choice(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)

    def codecs_used(**config):
        policy = solve_policy(profile, 0.35, AdaccConfig(**config))
        return {(c.action, c.codec) for plan in policy.plans for _, c in plan.choices if c.action is not Action.RETAIN}

    assert {codec for _, codec in codecs_used(actions=("retain", "recompute"))} <= {None, "bitmask"}
    assert Action.RECOMPUTE not in {action for action, _ in codecs_used(actions=("retain", "compress"))}
    assert {codec for _, codec in codecs_used(max_error=0.05)} <= {None, "int8", "bitmask"}
    assert {codec for _, codec in codecs_used(max_error=0)} <= {None, "bitmask"}
    assert {codec for _, codec in codecs_used(codecs=("int8",))} <= {None, "int8", "bitmask"}
    assert "outlier_int4" in {codec for _, codec in codecs_used(actions=("retain", "compress"))}


def test_an_impossible_fraction_names_the_least_one(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    config = AdaccConfig(actions=("retain", "recompute"))
    with pytest.raises(
        InfeasibleBudgetError, match=r"memory_budget=0\.01 .* stored outside the blocks .* Raise"
    ) as error:
        solve_policy(profile, 0.01, config)
    floor = error.value.smallest_budget_bytes
    assert str(floor) in str(error.value)
    assert solve_policy(profile, floor / profile.plain_stored_bytes, config).predicted_stored_bytes == floor


def test_an_impossible_peak_names_the_least_one_and_where_it_is(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    with pytest.raises(InfeasibleBudgetError, match=r"memory_budget='1GiB' \(1073741824 bytes\)") as error:
        solve_policy(profile, "1GiB")
    assert "reached in 'head and loss'" in str(error.value)
    assert solve_policy(profile, error.value.smallest_budget_bytes).predicted_peak_bytes == (
        error.value.smallest_budget_bytes
    )


def test_facts_go_into_a_policy_file(gpt2_like_profile, tmp_path):
    policy = solve_policy(gpt2_like_profile(num_blocks=1), 0.5)
    policy.save(tmp_path / "policy.json")
    loaded_policy = Policy.load(tmp_path / "policy.json")
    assert loaded_policy == policy
    assert loaded_policy.facts == policy.facts
    assert dict(loaded_policy.facts)["status"] == "feasible"
    assert 0.0 < dict(loaded_policy.facts)["gap"] < 0.1


def test_a_solver_out_of_time_still_keeps_to_the_budget(gpt2_like_profile, monkeypatch):
    monkeypatch.setattr(linear_program, "SOLVER_SECONDS", 0.001)
    profile = gpt2_like_profile(num_blocks=12)
    policy = solve_policy(profile, 0.3)
    assert policy.predicted_stored_bytes <= 0.3 * profile.plain_stored_bytes


def test_the_least_peak_is_that_of_all_policies_that_any_budget_finds(tight_profile):
    least = least_policy(tight_profile).predicted_peak_bytes
    assert solve_policy(tight_profile, least).predicted_peak_bytes == least
    with pytest.raises(InfeasibleBudgetError) as error:
        solve_policy(tight_profile, least - 1)
    assert error.value.smallest_budget_bytes == least


# The bound that the solver reports, against all policies of a small profile.


@settings(SOLVING, max_examples=20)
@given(data=st.data())
def test_no_policy_of_two_blocks_is_faster_than_the_gap_allows(profiles, data):
    profile = data.draw(profiles(num_kinds=data.draw(st.integers(1, 2)), max_blocks=2))
    outcomes = [best_outcomes(profile.kind_of(block)) for block in profile.blocks]
    part = data.draw(st.integers(1, 19)) / 20
    plain_bytes = uniform_policy(profile, "retain").predicted_peak_bytes
    for budget in (part, int(part * plain_bytes)):
        try:
            policy = solve_policy(profile, budget)
        except InfeasibleBudgetError:
            continue
        facts = dict(policy.facts)
        is_peak = facts["budget_of"] == "peak"
        best_ms = min(
            sum(outcome.overhead_ms for outcome in pair)
            for pair in itertools.product(*outcomes)
            if (simulate_blocks(profile, pair).peak_bytes if is_peak else bytes_of_step(profile, pair))
            <= facts["budget_bytes"]
        )
        # `frontier.SLOPE_TOLERANCE` of about 100 ms.
        assert (1 - facts["gap"]) * policy.predicted_overhead_ms <= best_ms + 1e-4
        if facts["status"] == "optimal":
            assert policy.predicted_overhead_ms <= best_ms + 1e-4


def best_outcomes(kind):
    """Return the outcomes of feasible plans, without those that another plan dominates."""
    best: dict[tuple[int, int, int, int, frozenset[int]], object] = {}
    for _, outcome in every_outcome_of(kind):
        sizes = (outcome.stored_bytes, outcome.live_bytes, outcome.working_bytes, outcome.forward_working_bytes)
        incumbent = best.setdefault((*sizes, outcome.shared), outcome)
        if outcome.overhead_ms < incumbent.overhead_ms:
            best[(*sizes, outcome.shared)] = outcome
    return list(best.values())


def test_large_models_come_close_to_the_bound(gpt2_like_profile):
    for num_blocks, most in ((12, 0.03), (48, 0.01)):
        profile = gpt2_like_profile(num_blocks=num_blocks)
        for part in (0.2, 0.5, 0.8):
            facts = dict(solve_policy(profile, part).facts)
            # The last block takes a single plan, and loses at most one step of many along the frontier.
            assert facts["gap"] < most
            assert facts["status"] == ("optimal" if facts["gap"] == 0.0 else "feasible")


def test_a_bound_is_never_above_the_least_peak(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    plain = uniform_policy(profile, "retain")
    error = infeasible_budget(profile, AdaccConfig(), Budget(1, 1, limits_peak=True), plain, bound=1 << 60)
    assert error.bound_bytes == error.smallest_budget_bytes
    assert "no policy needs less" not in str(error)
