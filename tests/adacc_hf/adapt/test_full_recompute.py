"""FullRecompute: the batch that calls every block, which the profile waits for."""

import pytest
import torch

from adacc_hf import AdaccConfig
from adacc_hf.adapt.phases import MOST_STEPS, FullRecompute, is_ready
from adacc_hf.artifacts.errors import UncalledBlocksError


def test_a_profile_waits_for_a_batch_that_trains_every_block(make_model):
    """Waiting ends at MOST_STEPS with an error that says what to set."""
    model, tokens = make_model(), torch.arange(8)[None]
    waiting = FullRecompute(model, AdaccConfig())
    blocks = model.transformer.h
    model.transformer.h = blocks[:1]
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert not is_ready(waiting, MOST_STEPS - 1)
    with pytest.raises(UncalledBlocksError, match=f"not called by the last of {MOST_STEPS} steps"):
        is_ready(waiting, MOST_STEPS)
    model.transformer.h = blocks
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert is_ready(waiting, 0)
    waiting.remove()
