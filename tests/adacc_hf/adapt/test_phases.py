"""Phases: errors that a phase leaves to the loop, and the phase of a policy that is passed in."""

from __future__ import annotations

import pytest
import torch
from run_builders import InOrder, failing, run_lengths

from adacc_hf import (
    AdaccCallback,
)
from adacc_hf.adapt.memory_table import LiveMemory
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.solve.simple_policies import uniform_policy


def test_without_retries_the_error_is_the_model_s_own(make_trainer, lossless, caplog):
    callback = AdaccCallback(**lossless, retry_out_of_memory=False)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room in forward$"):
        make_trainer([callback], trainer_class=failing((4, "forward")), max_steps=6).train()
    assert caplog.text.count("when it ran out") == 1


def test_a_policy_is_followed_from_the_first_step(train, profile):
    policy = uniform_policy(profile, "recompute")
    callback = AdaccCallback(policy=policy)
    run = train([callback])
    assert callback.policy is policy
    assert callback.profile is None
    assert callback.history[0]["step"] == 0
    run.assert_equals(train())


@pytest.fixture
def profile(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback], max_steps=2)
    return callback.profile


def test_a_policy_is_set_before_the_first_step(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback])
    assert [event["step"] for event in callback.history if event["event"] == "policy"] == [0]


def test_the_policy_is_set_after_the_profiled_steps_where_the_first_batch_leaves_blocks_out(
    train, lossless, late_policy
):
    for profile_steps in (1, 3):
        callback = AdaccCallback(**lossless, profile_steps=profile_steps)
        train([callback])
        policies = [event for event in callback.history if event["event"] == "policy"]
        assert [event["step"] for event in policies] == [profile_steps]
        assert callback.history[0]["stored_bytes"] == callback.policy.predicted_stored_bytes


def test_memory_is_listed_under_a_policy_that_was_passed_in(make_trainer, profile, caplog):
    callback = AdaccCallback(policy=uniform_policy(profile, "recompute"))
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room in forward$"):
        make_trainer([callback], trainer_class=failing((4, "forward")), max_steps=6).train()
    assert caplog.text.count("when it ran out") == 1


def test_an_error_within_the_table_leaves_the_out_of_memory_error(make_trainer, lossless, caplog, monkeypatch):
    monkeypatch.setattr(LiveMemory, "measure", lambda *_: 1 / 0)
    callback = AdaccCallback(**lossless, retry_out_of_memory=False)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room in forward$"):
        make_trainer([callback], trainer_class=failing((4, "forward")), max_steps=6).train()
    assert "no table of the device's memory: ZeroDivisionError" in caplog.text


def test_the_table_has_the_policy_of_the_failed_size(make_trainer, lossless, caplog):
    callback = AdaccCallback(**lossless, retry_out_of_memory=False)
    with pytest.raises(torch.OutOfMemoryError):
        run_lengths(
            make_trainer, [16] * 4 + [32], [callback], trainer_class=type("F", (failing((5, "forward")), InOrder), {})
        )
    (table,) = [record.getMessage() for record in caplog.records if "when it ran out" in record.getMessage()]
    (longer,) = [event for event in callback.history if event.get("reason", "").startswith("for batches of")]
    assert f"{format_bytes(longer['peak_bytes'])}" in table
