"""Checks that a policy keeps to the settings of the run, and that every block trains under a policy.

An uncovered block has no policy that selects actions for its activations, so that it runs plainly or under torch's
checkpoint. Possible reasons are that the operators of the block cannot be replayed, that the run has no policy, or that
a call cannot follow the policy. `AdaccConfig(on_uncovered="error")` allows up to `profile_steps` such steps before the
first policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from adacc_hf.artifacts.budget_values import HOST_SHARE
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncoveredBlockError
from adacc_hf.artifacts.policy import Action, Choice, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.tiles import TILE
from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.kernels.codecs import codec_type
from adacc_hf.run.entries import OTHER_OPERATORS, OUT_OF_PLACE, UNTRAINED


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
    """Return a text that names a lossy codec in `choices` and the setting that excludes it, or None."""
    codecs = sorted({choice.codec for choice in choices if choice.codec and not codec_type(choice.codec).lossless})
    if not codecs or (Action.COMPRESS.value in config.actions and config.max_error != 0):
        return None
    setting = config.describe_actions() if Action.COMPRESS.value not in config.actions else "max_error=0"
    return f"compresses with {codecs[0]}, which {setting} excludes"


def refuse_policy(policy: Policy, config: AdaccConfig, host_bytes: int, plain_bytes: float | None = None) -> None:
    """Raise ValueError if the user passed a policy together with settings that exclude its actions, with a smaller
    budget, or with a limit of host memory, `host_bytes`, that it exceeds.

    A budget of type float is a fraction of `plain_bytes`, the bytes that plain training stores. If `plain_bytes` is
    None, this number is read from `Policy.facts`. The default budget, "auto", is not checked.
    """
    reason, budget = excluded_action(policy, config), config.memory_budget
    if reason is not None:
        raise ValueError(
            f"the policy that was passed in {reason}: leave out this setting, or pass a policy that was solved with it"
        )
    what, needed = "has a peak of", policy.predicted_peak_bytes
    if isinstance(budget, float):
        facts = dict(policy.facts)
        if plain_bytes is None and isinstance(facts.get("memory_budget"), float):
            plain_bytes = facts["budget_bytes"] / facts["memory_budget"]
        what, needed = "stores", policy.predicted_stored_bytes
        allowed = needed if plain_bytes is None else math.ceil(budget * plain_bytes)
    elif budget == "auto":
        allowed = needed
    else:
        allowed = budget if isinstance(budget, int) else parse_bytes(budget, "memory_budget")
    if needed > allowed:
        raise ValueError(
            f"memory_budget={budget!r} allows {format_bytes(allowed)}, and the policy that was passed with it {what} "
            f"{format_bytes(needed)}: leave one of the two out, or pass a policy that was solved for this budget"
        )
    if policy.predicted_host_bytes > host_bytes:
        needed_text = format_bytes(policy.predicted_host_bytes)
        raise ValueError(
            f"host_memory={config.host_memory!r} allows {format_bytes(host_bytes)} of the host's free memory, and the "
            f"policy that was passed with it stores {needed_text} there: set host_memory to at least {needed_text}, "
            f"which may be {HOST_SHARE:.0%} of the free memory, or pass a policy that was solved for this limit"
        )


MOST_NAMES = 4
"""Maximum number of block names in an error message."""
ALL_BLOCKS = "all blocks"
CHANGE_BLOCKS = "change what the reason names (docs/LIMITS.md, Whole blocks instead of activations)"
SAME_SIZE = "pad batches to one size, or begin with the largest"
REMEDIES = {
    OTHER_OPERATORS: "let all batches run the operators of the first one (pad all of them, or none; train in one mode)",
    UNTRAINED: "begin with a batch that trains every block",
    OUT_OF_PLACE: "switch or merge adapters between steps only, and begin a new run after that",
}
"""Instructions in the error message, keyed by the reason why a call did not follow its plan. The instruction for all
other reasons is CHANGE_BLOCKS."""


def refuse_uncovered(config: AdaccConfig, blocks: str, reason: str, remedy: str) -> None:
    """If `on_uncovered` is "error", raise UncoveredBlockError: `blocks` have no policy, with `reason`, `remedy`."""
    if config.on_uncovered == "error":
        raise UncoveredBlockError(
            f"on_uncovered='error' allows no block without a policy, but {blocks} would train without one: {reason}. "
            f"To cover them, {remedy}. To train them nevertheless, set on_uncovered='warn'"
        )


def refuse_whole_blocks(config: AdaccConfig, policy: Policy, profile: Profile) -> None:
    """If `on_uncovered` is "error", raise UncoveredBlockError for blocks without an action per activation."""
    reasons = {kind.digest: kind.untrusted for kind in profile.kinds if kind.untrusted is not None}
    kinds = {name: policy.plans[index].kind for name, index in policy.blocks}
    names = [name for name, kind in kinds.items() if kind in reasons]
    if names:
        listed = "; ".join(sorted({reasons[kinds[name]] for name in names}))
        reason = f"their operators cannot be replayed ({listed})"
        refuse_uncovered(config, describe_blocks(names), reason, CHANGE_BLOCKS)


def refuse_fallbacks(config: AdaccConfig, fallbacks: Mapping[str, Iterable[str]]) -> None:
    """If `on_uncovered` is "error", raise UncoveredBlockError for calls that did not follow their plan. `fallbacks`
    contains their blocks by reason."""
    for reason, names in fallbacks.items():
        refuse_uncovered(config, describe_blocks(names), reason, REMEDIES.get(reason, CHANGE_BLOCKS))


def describe_blocks(names: Iterable[str]) -> str:
    """Return text with the number of blocks and the first few `names`."""
    listed = list(names)
    shown = ", ".join(listed[:MOST_NAMES]) + (", ..." if len(listed) > MOST_NAMES else "")
    return f"{len(listed)} block{'' if len(listed) == 1 else 's'} ({shown})"
