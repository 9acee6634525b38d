"""Time of the blocks in a plain step, estimated from a profile. Overheads are compared with this time."""

from __future__ import annotations

from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.artifacts.profile import Profile

PASSES_OF_A_STEP = 3
"""Time of the blocks in a plain step, as a multiple of their forward time: a backward takes about two forwards.

`Profile.step_ms` cannot be used instead, because on a CPU, recording the memory of the measured step takes longer than
the step.
"""


def plain_blocks_ms(profile: Profile) -> float:
    """Estimate the milliseconds of the blocks in a plain step from the time that recomputing their forward takes."""
    plans = [recompute_plan(profile.kind_of(block)) for block in profile.blocks]
    return PASSES_OF_A_STEP * simulate(profile, plans).overhead_ms
