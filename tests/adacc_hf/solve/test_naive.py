"""The policy that quantizes whatever a codec takes. What it does in training is tested with the Trainer's methods."""

from __future__ import annotations

import pytest

from adacc_hf.solve.baselines import quantize_everything


def test_a_profile_without_the_codec_is_refused(gpt2_like_profile) -> None:
    with pytest.raises(ValueError, match="codec='token_int4' was not priced"):
        quantize_everything(gpt2_like_profile(num_blocks=2))
