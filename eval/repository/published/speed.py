"""Predictions for pairs of speeds: step times by the planner's roofline, under two modes of checkpointing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache

from adacc_hf.artifacts.block_outcome import rerun_ms
from adacc_hf.artifacts.kind_profile import KindProfile, Operator
from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.planning import plain_ms, training_profile
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.repository.published.measurements import Pair, Setting
from adacc_hf.eval.repository.published.older_versions import older_behaviours
from adacc_hf.eval.repository.published.prediction import request_of

_PRODUCTS = ("mm", "addmm")


def predict_pair(pair: Pair) -> Figures:
    """Predict the time of the other run divided by the time of the base run, for the same number of tokens."""
    start_s = time.process_time()
    base_ms, other_ms = (step_ms(setting) / (setting.batch * setting.length) for setting in pair.settings)
    return {
        "status": Status.MEASURED.value,
        "ratio": other_ms / base_ms,
        "tokens_per_ms": [1 / base_ms, 1 / other_ms],
        "cpu_seconds": round(time.process_time() - start_s, 1),
    }


def step_ms(setting: Setting) -> float:
    """Return the milliseconds of one forward and backward of `setting`."""
    profile = _profile_of(json.dumps({**asdict(setting), "checkpointing": "none"}))
    return plain_ms(profile) + MODES[setting.checkpointing](profile)


@lru_cache(maxsize=2)
def _profile_of(setting: str) -> Profile:
    """Return the profile of a step of a setting (as JSON), which is equal for all modes of checkpointing."""
    parsed_setting = Setting(**json.loads(setting))
    with older_behaviours(parsed_setting.older):
        _, profile = training_profile(request_of(parsed_setting))
    return profile


def _every_block(of_kind: Callable[[KindProfile], float]) -> Callable[[Profile], float]:
    return lambda profile: sum(of_kind(profile.kind_of(block)) for block in profile.blocks)


def _second_blocks(profile: Profile) -> float:
    return sum(rerun_ms(profile.kind_of(block)) for block in profile.blocks[::2])


def _cheap_operators(kind: KindProfile) -> float:
    """Return the recomputed ms: all operators up to the last saved tensor, except attention and every second product
    (torchtitan, apply_ac)."""
    products = [operator for operator in kind.operators if _name(operator) in _PRODUCTS]
    attention = [operator for operator in kind.operators if "scaled_dot_product" in _name(operator)]
    saved_indices = {operator.index for operator in (*products[::2], *attention)}
    last = max(kind.values[value].producer or 0 for value in kind.slots if value >= 0)
    return sum(operator.ms for operator in kind.operators[: last + 1] if operator.index not in saved_indices)


def _core_attention(kind: KindProfile) -> float:
    """Return the ms of core attention: from the product of queries and keys to the product with the values
    (Korthikanti et al., section 5)."""
    batched = [operator.index for operator in kind.operators if _name(operator) == "bmm"]
    return sum(operator.ms for operator in kind.operators[batched[0] : batched[-1] + 1])


def _name(operator: Operator) -> str:
    return operator.name.split(".")[1]


MODES: dict[str, Callable[[Profile], float]] = {
    "none": lambda profile: 0.0,
    "full": _every_block(rerun_ms),
    "full, whole block": _every_block(lambda kind: kind.forward_ms),
    "every second block": _second_blocks,
    "by operator": _every_block(_cheap_operators),
    "core attention": _every_block(_core_attention),
}
"""Recomputed milliseconds by the name of the mode. In Megatron's checkpoints, reentrant checkpoints and checkpoints
of compiled blocks, recomputation always runs to the end of the block."""
