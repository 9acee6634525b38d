"""The plot of overhead against peak: its curve is monotone, and its marks agree with the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from adacc_hf.artifacts.block_outcome import rerun_ms
from adacc_hf.reports.plots import draw_frontier, marks, trade_off
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import solve_policy


@pytest.fixture(scope="module")
def profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=3, attention="eager")


def test_the_curve_falls_from_the_floor_to_plain(profile) -> None:
    curve = trade_off(profile)
    assert all(left[0] < right[0] and left[1] > right[1] for left, right in pairwise(curve))
    assert curve[-1] == (uniform_policy(profile, "retain").predicted_peak_bytes, 0.0)
    peak, ms = curve[len(curve) // 2]
    assert solve_policy(profile, peak).predicted_overhead_ms <= ms + 1e-9  # sums in another order


def test_marks_are_plain_checkpointing_quantization_and_the_policy(profile) -> None:
    policy = solve_policy(profile, 0.5)
    plain, full, quantized, ours = marks(profile, policy)
    assert plain.point == (uniform_policy(profile, "retain").predicted_peak_bytes, 0.0)
    assert full.point[0] == uniform_policy(profile, "recompute").predicted_peak_bytes
    assert full.point[1] == pytest.approx(3 * rerun_ms(profile.kinds[0]))
    assert quantized.name == "all compressed, codec by layer"
    assert ours.point == (policy.predicted_peak_bytes, policy.predicted_overhead_ms)


def test_per_token_int4_is_the_naive_one_where_it_was_priced(profile) -> None:
    (kind,) = profile.kinds
    value = next(value for value in kind.activations if value.codecs)
    naive = replace(value.codecs[0], codec="token_int4")
    values = tuple(replace(v, codecs=(*v.codecs, naive)) if v is value else v for v in kind.values)
    other = replace(profile, kinds=(replace(kind, values=values),))
    assert marks(other, uniform_policy(other, "retain"))[2].name == "naive quantization (token_int4)"


def test_a_budget_is_drawn(profile) -> None:
    policy = solve_policy(profile, 0.5)
    pictures = {draw_frontier(profile, policy, budget) for budget in (None, policy.predicted_peak_bytes)}
    assert len(pictures) == 2
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
