"""Transformers' warnings about caches and checkpointing do not appear under a policy."""

import logging

import pytest

from adacc_hf import apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import FLAG, GradientCheckpointingLayer, switch_checkpointing

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


def checkpoint_layers(model):
    """Switch checkpointing on for each layer. If the model has it on, it leaves the cache out by itself."""
    switch_checkpointing(model, True)
    for module in model.modules():
        if hasattr(module, FLAG) and not isinstance(module, GradientCheckpointingLayer):
            setattr(module, FLAG, False)


def caching(token_batch):
    return {**token_batch(), "use_cache": True}


def test_the_warning_comes_only_after_the_policy(tiny_gpt2, token_batch, run_steps, new_messages):
    model = tiny_gpt2(use_cache=True)
    with recomputing(model, token_batch()):
        run_steps(model, caching(token_batch), num_steps=1)
        LOG.warning("another matter")
    assert new_messages() == ["another matter"]
    checkpoint_layers(model)
    run_steps(model, caching(token_batch), num_steps=1)
    assert any(text.startswith("Caching is incompatible") for text in new_messages())
