"""What a run's profile is told of the optimizer."""

import logging

import pytest
import torch

from adacc_hf import AdaccConfig
from adacc_hf.callbacks.policy_maker import PolicyMaker


class Unforeseeable(torch.optim.SGD):
    """Takes a step on nothing but the model's own parameters."""

    def step(self, closure=None):
        raise RuntimeError("who are you?")


@pytest.fixture
def maker():
    return PolicyMaker(AdaccConfig(), None, 1, None)


def test_a_state_that_nobody_foresees_ends_no_run(maker, caplog):
    """As after first steps that fp16 has left out, one and all."""
    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING):
        assert maker._coming_bytes(model, Unforeseeable(model.parameters())) == 0
    (record,) = caplog.records
    assert "optimizer=Unforeseeable(...) has yet to make its state" in record.message
    assert "who are you?" in record.message
    assert "until a step is counted" in record.message


def test_a_state_that_is_foreseen_is_left_to_the_profile(maker, caplog):
    model = torch.nn.Linear(2, 2)
    assert maker._coming_bytes(model, torch.optim.AdamW(model.parameters())) is None
    assert maker._coming_bytes(model, None) == 0
    maker.inner_steps.were_seen = True
    assert maker._coming_bytes(model, Unforeseeable(model.parameters())) == 0
    assert not caplog.records
