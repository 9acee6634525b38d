"""Time of the blocks in a plain step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adacc_hf.artifacts.step_time import plain_blocks_ms
from adacc_hf.solve.simple_policies import uniform_policy


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_the_blocks_take_three_forwards(gpt2_like_profile: Any, num_blocks: int) -> None:
    profile = gpt2_like_profile(num_blocks=num_blocks)
    assert plain_blocks_ms(profile) == 3 * uniform_policy(profile, "recompute").predicted_overhead_ms > 0
    assert plain_blocks_ms(replace(profile, step_ms=1000.0, head_ms=1000.0)) == plain_blocks_ms(profile)
