"""Solver kinds: copies of a profile share the results of equal kinds, and of no others."""

from __future__ import annotations

from dataclasses import replace

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.plans import plain_plan
from adacc_hf.solve.kinds import Kinds
from adacc_hf.solve.minimum_peak import PeakOracle

CONFIG = AdaccConfig()


def test_equal_kinds_are_solved_once_and_changed_kinds_again(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    first = Kinds.of(profile, CONFIG)
    (kind,) = profile.kinds
    copy = replace(profile, kinds=(replace(kind, forward_ms=kind.forward_ms),), static_bytes=profile.static_bytes + 1)
    same = Kinds.of(copy, CONFIG, [first])
    assert same.members[0] is first.members[0]
    assert same.frontiers[0] is first.frontiers[0]
    assert same.by_bytes.frontiers[0] is first.by_bytes.frontiers[0]

    events = tuple(replace(event, extra_bytes=event.extra_bytes + 1) for event in kind.forward)
    other = Kinds.of(replace(profile, kinds=(replace(kind, forward=events), kind)), CONFIG, [first, same])
    assert other.members[0] is not first.members[0]
    assert other.members[1] is first.members[0]


def test_plain_training_stores_what_it_stores_without_tiles(gpt2_like_profile):
    profile = gpt2_like_profile(num_blocks=2)
    first = Kinds.of(profile, CONFIG)
    assert first.plain_stored_bytes == profile.plain_stored_bytes
    tiled = replace(profile, outside_stored_bytes=profile.outside_stored_bytes + 8)
    assert Kinds.of(tiled, CONFIG, [first]).plain_stored_bytes == profile.plain_stored_bytes
    assert Kinds.of(tiled, CONFIG).by_bytes.plain_stored_bytes == profile.plain_stored_bytes + 8


def test_outcomes_are_simulated_once_for_all_prices(gpt2_like_profile, monkeypatch):
    profile = gpt2_like_profile(num_blocks=2)
    kinds = Kinds.of(profile, CONFIG)
    by_time = PeakOracle(profile, kinds.outcomes)
    by_bytes = PeakOracle(profile, kinds.by_bytes.outcomes)
    plan = next(each for each in kinds.frontiers[0] if each.plan == plain_plan(profile.kinds[0]))
    outcome = by_time.outcome(0, plan)
    monkeypatch.setattr("adacc_hf.solve.minimum_peak.run_block", lambda *_: None)
    same = next(each for each in kinds.by_bytes.frontiers[0] if each.plan == plan.plan)
    assert by_bytes.outcome(0, same) is outcome
