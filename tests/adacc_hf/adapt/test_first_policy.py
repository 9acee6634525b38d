"""PolicyBuilder: the first policy within a device's memory, and budgets that a user's policy exceeds."""

from __future__ import annotations

import pytest

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.solve.simple_policies import uniform_policy

QUIET = {"tracking": "off", "min_compress_bytes": 0}
BATCH_SIZE = 16
BATCH_BYTES = 2 * BATCH_SIZE * 32 * 8
"""Bytes of the token numbers and labels of one micro-batch."""


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
