"""Profiles that several tests read."""

import pytest

from adacc_hf import AdaccConfig, profile_model


@pytest.fixture(scope="module")
def gpt2_profile(tiny_gpt2, token_batch):
    """The profile of a GPT-2 of three blocks, codecs for small tensors included."""
    return profile_model(tiny_gpt2(layers=3), token_batch(), AdaccConfig(min_compress_bytes=0))
