"""Readings from real runs."""

import torch
from torch import nn

from adacc_hf.price import measurement as measurement
from adacc_hf.price import timing


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch):
    """On a GPU what was started before would otherwise count as part of it, and what it started would not."""
    events = []

    def forward_loss(model, batch):
        events.append("step")
        return model(batch["x"]).sum()

    monkeypatch.setattr(timing, "wait_for", lambda device: events.append(f"wait for {device}"))
    monkeypatch.setattr(measurement, "forward_loss", forward_loss)
    model = nn.Linear(2, 2)
    assert measurement.Measurement().step_ms(model, {"x": torch.ones(1, 2)}) > 0.0
    assert events == ["wait for cpu", "step", "wait for cpu"]
    assert model.weight.grad is None
