"""FullRecompute: the batch that calls every block, which the profile waits for."""

import pytest
import torch

from adacc_hf import AdaccConfig
from adacc_hf.adapt import phases
from adacc_hf.adapt.phases import MOST_STEPS, FullRecompute, skipped_on_any_rank
from adacc_hf.artifacts.errors import UncalledBlocksError


def test_a_profile_waits_for_a_batch_that_trains_every_block(make_model, monkeypatch, caplog):
    """Waiting ends at MOST_STEPS: the blocks that all ranks leave out are not waited for."""
    model, tokens, config = make_model(), torch.arange(8)[None], AdaccConfig()
    waiting = FullRecompute(model, config)
    blocks = model.transformer.h
    model.transformer.h = blocks[:1]
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert skipped_on_any_rank(waiting, MOST_STEPS - 1) == ["transformer.h.1"]
    assert skipped_on_any_rank(waiting, MOST_STEPS) == []
    assert f"transformer.h.1 first, were not called by the last of {MOST_STEPS} steps" in caplog.text
    waiting.begin_step()
    with pytest.raises(UncalledBlocksError, match="2 of 2 blocks"):  # nothing is left to make a policy for
        skipped_on_any_rank(waiting, MOST_STEPS)
    model.transformer.h = blocks
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert skipped_on_any_rank(waiting, 0) == []
    # Another rank's batch may leave blocks out. All ranks have the same error.
    monkeypatch.setattr(phases, "gather_from_all_ranks", lambda own: [own, ["transformer.h.1"], ["transformer.h.0"]])
    assert skipped_on_any_rank(waiting, 0) == ["transformer.h.0", "transformer.h.1"]
    with pytest.raises(UncalledBlocksError, match=r"transformer\.h\.0.*not called by the last of"):
        skipped_on_any_rank(waiting, MOST_STEPS)
    waiting.remove()
