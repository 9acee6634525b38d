"""Transformers' warnings about caches and checkpointing do not appear under a policy."""

import logging

import pytest

from adacc_hf import apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import GradientCheckpointingLayer

LOG = logging.getLogger(GradientCheckpointingLayer.__module__)


@pytest.fixture
def new_messages(caplog):
    """Messages of Transformers' layers so far, without those logged before the test."""
    logging.Logger.warning_once.cache_clear()
    LOG.addHandler(caplog.handler)
    # Once each: Transformers may pass its records on to pytest too.
    yield lambda: list(dict.fromkeys(r.getMessage() for r in caplog.records if r.name == LOG.name))
    LOG.removeHandler(caplog.handler)


def recomputing(model, batch):
    """Return `model` under a policy of a profile that logged no message."""
    return apply_policy(model, uniform_policy(profile_model(model, batch), "recompute"))


def caching(token_batch):
    return {**token_batch(), "use_cache": True}


def test_there_is_no_warning_under_a_policy(tiny_gpt2, token_batch, run_steps, new_messages):
    model = tiny_gpt2(use_cache=True)
    with recomputing(model, token_batch()):
        run_steps(model, caching(token_batch), num_steps=1)
        LOG.warning("another matter")
    assert new_messages() == ["another matter"]
    assert not LOG.filters
