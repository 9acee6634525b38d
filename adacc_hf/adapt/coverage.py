"""Checks that every block trains under a policy, for `AdaccConfig(on_uncovered="error")`.

A block is uncovered if no policy selects actions for its activations, so that the block runs plainly or under torch's
checkpoint. Possible reasons are that the operators of the block cannot be replayed, that the run has no policy, or that
a call cannot follow the policy. Up to `profile_steps` steps before the first policy are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncoveredBlockError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.run.entries import OTHER_OPERATORS, OUT_OF_PLACE, TRANSIENT, UNTRAINED
from adacc_hf.tape.tape_cache import Fallbacks

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
    """Raise UncoveredBlockError if `on_uncovered` is "error".

    `blocks` names the blocks, `reason` says why the blocks have no policy, and `remedy` is an instruction, such as "pad
    batches to one size".
    """
    if config.on_uncovered == "error":
        raise UncoveredBlockError(
            f"on_uncovered='error' allows no block without a policy, but {blocks} would train without one: {reason}. "
            f"To cover them, {remedy}. To train them nevertheless, set on_uncovered='warn'"
        )


def refuse_whole_blocks(config: AdaccConfig, policy: Policy, profile: Profile) -> None:
    """If `on_uncovered` is "error", raise UncoveredBlockError for blocks that have no action per activation in
    `policy`."""
    reasons = {kind.digest: kind.untrusted for kind in profile.kinds if kind.untrusted is not None}
    kinds = {name: policy.plans[index].kind for name, index in policy.blocks}
    names = [name for name, kind in kinds.items() if kind in reasons]
    if names:
        listed = "; ".join(sorted({reasons[kinds[name]] for name in names}))
        refuse_uncovered(
            config, describe_blocks(names), f"their operators cannot be replayed ({listed})", CHANGE_BLOCKS
        )


def refuse_fallbacks(config: AdaccConfig, fallbacks: Fallbacks) -> None:
    """If `on_uncovered` is "error", raise UncoveredBlockError for calls of a micro-batch that did not follow their
    plan.

    Calls with a reason in `TRANSIENT` are allowed, because such a reason does not apply to the block's next call.
    """
    for reason, names in fallbacks.blocks.items():
        if reason not in TRANSIENT:
            refuse_uncovered(config, describe_blocks(names), reason, REMEDIES.get(reason, CHANGE_BLOCKS))


def describe_blocks(names: Iterable[str]) -> str:
    """Return text with the first few of the block `names` and, if there are more, the total number."""
    listed = list(names)
    shown = ", ".join(listed[:MOST_NAMES]) + (", ..." if len(listed) > MOST_NAMES else "")
    return f"{len(listed)} block{'' if len(listed) == 1 else 's'} ({shown})"
