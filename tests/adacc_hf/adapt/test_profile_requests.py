"""ProfileRequests: later batches that a run profiles, or cannot profile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from run_builders import events, refuse_profiles_of, run_lengths

from adacc_hf import AdaccCallback
from adacc_hf.adapt.profile_requests import FALLBACK_MODES, MORE_BLOCKS, MOST_TRIES, OTHER_OPERATORS, ProfileRequests


def test_a_size_that_is_not_recorded_stays_without_a_policy(make_trainer, monkeypatch, late_policy):
    refuse_profiles_of(32, monkeypatch)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.6)
    trainer = run_lengths(make_trainer, [16] * 4 + [32] * 16, [callback])
    assert trainer.state.global_step == 20
    assert len(events(callback, "policy")) == 1


def fake_requests():
    """Return requests of one rank, and the state that they ask about: of blocks, and of batches that diverge."""
    state = SimpleNamespace(skipped=[], uncalled=[], idle=set(), num_calls=0, diverged=False, most_diverged=False)
    cache = SimpleNamespace(idle_blocks=state.idle, is_full=True)
    diverged = SimpleNamespace(most_diverged=lambda: state.most_diverged)
    choice = SimpleNamespace(cache=cache, diverged=diverged)
    block = SimpleNamespace(num_calls=0)
    installation = SimpleNamespace(blocks={"h.0": block, "h.1": block}, uncalled=lambda: state.uncalled)
    return ProfileRequests(choice, installation), state, block, diverged


def request(why):
    """Return requests that search for a batch to start over with, for the reason `why`."""
    requests, state, block, diverged = fake_requests()
    if why == MORE_BLOCKS:
        state.idle.add("h.1")
        block.num_calls = 1
    else:
        state.most_diverged = True
    requests.look()
    assert (requests.why, requests.num_tries) == (why, MOST_TRIES)
    return requests, state, diverged


@pytest.mark.parametrize(
    ("called", "uncalled", "expected"),
    [({"h.0", "h.1#2"}, [], True), ({"h.1"}, [], False), ({"h.1"}, ["h.0"], True), (set(), ["h.0", "h.1"], False)],
)
@pytest.mark.parametrize("why", [MORE_BLOCKS, OTHER_OPERATORS])
def test_a_batch_is_taken_if_it_calls_every_block(why, called, uncalled, expected):
    requests, state, _ = request(why)
    state.uncalled = uncalled
    assert requests.can_restart(called) == expected


def test_a_search_ends_after_so_many_batches_and_a_reason_is_remembered():
    assert {MORE_BLOCKS, OTHER_OPERATORS} == set(FALLBACK_MODES)
    requests, *_ = request(OTHER_OPERATORS)
    for _ in range(MOST_TRIES):
        assert requests.num_tries > 0
        assert not requests.can_restart(set())
    assert requests.num_tries == 0
    requests.look()
    assert requests.num_tries == 0, "each reason begins one search"
