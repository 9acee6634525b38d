"""Checks that a policy from a user or from a checkpoint keeps to the settings of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable

from adacc_hf.artifacts.budget_values import HOST_SHARE
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Action, Choice, Policy
from adacc_hf.artifacts.tiles import TILE
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.kernels.codecs import codec_type


def excluded_action(policy: Policy, config: AdaccConfig) -> str | None:
    """Return what `policy` does although the settings exclude it, with the setting, or None.

    Example: "compresses with int8, which exact=True excludes". Dropout masks may always be stored
    as bits, and tensors moved to host memory, because both are lossless.
    """
    actions = config.describe_actions()
    choices = [choice for plan in policy.plans for _, choice in plan.choices]
    if Action.RECOMPUTE.value not in config.actions and any(choice.action is Action.RECOMPUTE for choice in choices):
        return f"recomputes activations, which {actions} excludes"
    codec = excluded_codec(choices, config)
    if codec is not None:
        return codec
    if policy.head not in config.heads and policy.head == "chunked":
        return f"has a chunked head, which {actions} with head={config.head!r} excludes"
    if not config.allows_tiles and any(tiling is not None for tiling in policy.tilings):
        setting = actions if TILE not in config.actions else "max_error=0"
        return f"runs modules in tiles, which {setting} excludes"
    return None


def excluded_codec(choices: Iterable[Choice], config: AdaccConfig) -> str | None:
    """Return a text that names a lossy codec in `choices` and the setting that excludes it, or None if all codecs are
    allowed."""
    codecs = sorted({choice.codec for choice in choices if choice.codec and not codec_type(choice.codec).lossless})
    if not codecs or (Action.COMPRESS.value in config.actions and config.max_error != 0):
        return None
    setting = config.describe_actions() if Action.COMPRESS.value not in config.actions else "max_error=0"
    return f"compresses with {codecs[0]}, which {setting} excludes"


def refuse_other_actions(policy: Policy, config: AdaccConfig) -> None:
    """Raise ValueError if the user passed a policy together with settings that exclude its actions."""
    reason = excluded_action(policy, config)
    if reason is not None:
        raise ValueError(
            f"the policy that was passed in {reason}: leave out this setting, or pass a policy that was solved with it"
        )


def refuse_above_budget(policy: Policy, memory_budget: str | float | int, plain_bytes: float | None = None) -> None:
    """Raise ValueError if the user passed a policy together with a budget that the policy exceeds.

    A budget of type float is a fraction of `plain_bytes`, the bytes that plain training stores. If `plain_bytes` is
    None, this number is read from `Policy.facts`. The default budget, "auto", is not checked.
    """
    if memory_budget == "auto":
        return
    if isinstance(memory_budget, float):
        facts = dict(policy.facts)
        solved_for = facts.get("memory_budget")
        if plain_bytes is None and isinstance(solved_for, float):
            plain_bytes = facts["budget_bytes"] / solved_for
        if plain_bytes is None:
            return
        what, needed, allowed = "stores", policy.predicted_stored_bytes, math.ceil(memory_budget * plain_bytes)
    else:
        allowed = memory_budget if isinstance(memory_budget, int) else parse_bytes(memory_budget, "memory_budget")
        what, needed = "has a peak of", policy.predicted_peak_bytes
    if needed > allowed:
        raise ValueError(
            f"memory_budget={memory_budget!r} allows {format_bytes(allowed)}, and the policy that was passed with it "
            f"{what} {format_bytes(needed)}: leave one of the two out, or pass a policy that was solved for this budget"
        )


def refuse_above_host_memory(policy: Policy, config: AdaccConfig, limit_bytes: int) -> None:
    """Raise ValueError if the user passed a policy that stores more than `limit_bytes` in host memory.

    `limit_bytes` follows from the setting `host_memory` and the free memory of the hosts.
    """
    if policy.predicted_host_bytes <= limit_bytes:
        return
    needed = format_bytes(policy.predicted_host_bytes)
    raise ValueError(
        f"host_memory={config.host_memory!r} allows {format_bytes(limit_bytes)} of the host's free memory, and the "
        f"policy that was passed with it stores {needed} there: set host_memory to at least {needed}, which may be "
        f"{HOST_SHARE:.0%} of the free memory, or pass a policy that was solved for this limit"
    )
