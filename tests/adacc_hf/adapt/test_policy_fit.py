"""PolicyFit: sizes at which no policy keeps to the budget. The first policy within a device's memory."""

from __future__ import annotations

import pytest
from run_builders import events, run_lengths

from adacc_hf import AdaccCallback, AdaccConfig, InfeasibleBudgetError
from adacc_hf.adapt import policy_choice
from adacc_hf.price.codec_selection import resize_profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import least_policy

QUIET = {"tracking": "off", "min_compress_bytes": 0}
BATCH_SIZE = 16
BATCH_BYTES = 2 * BATCH_SIZE * 32 * 8
"""Bytes of the token numbers and labels of one micro-batch."""


@pytest.mark.parametrize("reaction", ["warn", "error"])
def test_a_size_at_which_nothing_keeps_to_the_budget_is_said_before_it_runs(make_trainer, make_model, caplog, reaction):
    probe = AdaccCallback(actions=("retain", "recompute"), memory_budget=0.4)
    run_lengths(make_trainer, [15, 16, 16], [probe], model=make_model())
    # The budget is slightly above the least peak: length 16 keeps to it, and length 20 of the next size class needs 8 %
    # more.
    budget = int(1.03 * least_policy(probe.profile, probe.config).predicted_peak_bytes)
    callback = AdaccCallback(actions=("retain", "recompute"), memory_budget=budget, on_over_budget=reaction)
    lengths = [15, 16, 16, 32, 32, 16]
    if reaction == "error":
        with pytest.raises(
            InfeasibleBudgetError, match=r"batches of input_ids 4x32, labels 4x32 need \d+ bytes at least"
        ):
            run_lengths(make_trainer, lengths, [callback], model=make_model())
        return
    run_lengths(make_trainer, lengths, [callback], model=make_model())
    memory_events = [event for event in events(callback, "memory") if " bytes at least" in event.get("reason", "")]
    assert [event["step"] for event in memory_events] == [4]
    assert memory_events[0]["reason"].startswith("batches of input_ids 4x32, labels 4x32 need ")
    assert len([message for message in caplog.messages if "with the least memory" in message]) == 1


@pytest.mark.gate
def test_batches_of_a_class_above_the_budget_share_policies(make_trainer, make_model, monkeypatch):
    """Between the least peaks at 27 and at 30 tokens, no policy fits the bounds of the class of 25 to 30 tokens."""
    monkeypatch.setattr(policy_choice, "SOLVER_MS", 1e9)
    settings = {"actions": ("retain", "recompute"), "memory_budget": 0.4}
    probe = AdaccCallback(**settings)
    run_lengths(make_trainer, [20, 22, 24], [probe], model=make_model())

    def least_bytes(length):
        sizes = (("input_ids", (4, length)), ("labels", (4, length)))
        return least_policy(resize_profile(probe.profile, sizes)).predicted_peak_bytes

    budget = (3 * least_bytes(27) + least_bytes(30)) // 4
    callback = AdaccCallback(**settings | {"memory_budget": budget})
    run_lengths(make_trainer, [20, 22, *[24] * 6, 27, 26, 25, 27, 25], [callback], model=make_model())
    others = [event for event in events(callback, "policy") if event["step"] > 8]
    assert [event["reason"] for event in others] == ["for batches of input_ids 4x27, labels 4x27"]
    assert others[0]["peak_bytes"] <= budget


@pytest.fixture
def device_with(monkeypatch):
    """Return `device_with(nbytes)`, which sets the bytes of device memory that this process may use."""

    def set_memory(nbytes: int) -> None:
        monkeypatch.setattr("adacc_hf.price.measurement.available_bytes", lambda device, static_bytes: nbytes)

    return set_memory


def test_what_fits_the_device_is_trained_as_it_is(train, device_with, heads_take):
    device_with(1 << 40)
    heads_take(plain=1.0, chunked=1.0)
    callback = AdaccCallback(memory_budget="auto", **QUIET)
    run = train([callback])
    assert callback.policy.is_plain
    run.assert_equals(train())


def test_what_does_not_fit_keeps_to_the_device_less_the_margin(
    make_trainer, make_model, measure_step_peak, device_with
):
    settings = {"per_device_train_batch_size": BATCH_SIZE, "max_steps": 3}
    device_with(1 << 40)
    plain, adacc = (AdaccCallback(memory_budget="auto", **QUIET) for _ in range(2))
    make_trainer([plain], model=make_model(), **settings).train()
    peaks = [uniform_policy(plain.profile, action).predicted_peak_bytes for action in ("retain", "recompute")]
    budget_bytes = sum(peaks) // 2
    device_with(int(budget_bytes / (1 - AdaccConfig().memory_margin)) + 1)
    peak_meter = measure_step_peak(5)
    make_trainer([adacc, peak_meter], model=make_model(), **{**settings, "max_steps": 5}).train()
    assert dict(adacc.policy.facts)["budget_bytes"] == budget_bytes
    assert not adacc.policy.is_plain
    assert peak_meter.peak_bytes + 2 * BATCH_BYTES <= budget_bytes
