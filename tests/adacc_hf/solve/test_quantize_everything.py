"""The policy that quantizes every value with a codec. The Trainer's tests cover its effects on training."""

from __future__ import annotations

import pytest

from adacc_hf.solve.simple_policies import quantize_everything


def test_a_profile_without_the_codec_is_refused(gpt2_like_profile) -> None:
    with pytest.raises(ValueError, match="codec='token_int4' was not priced"):
        quantize_everything(gpt2_like_profile(num_blocks=2))
