"""The profiler: its results for GPT-2, and that it leaves a model unchanged."""

import pytest

from adacc_hf import AdaccConfig, profile_model

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_a_batch_without_labels_is_refused(tiny_gpt2, token_batch):
    model = tiny_gpt2()
    modules = {name: dict(m.__dict__) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="add the labels to the batch"):
        profile_model(model, {"input_ids": token_batch()["input_ids"]})
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == modules


def test_a_profile_of_a_block_that_keeps_its_activations(toy_model, toy_batch):
    """Activations that a block keeps in an attribute, which die after the meter ended, do not break the profile."""

    def forward(block, hidden):
        block.kept = block.up(hidden).tanh()
        return hidden + block.down(block.kept)

    profile = profile_model(toy_model(forward), toy_batch(), CONFIG)
    assert len(profile.kinds) == 1
