"""Policies that need no solver: a policy with the caller's plans, policies with one action for all activations, the
policy that runs every block under torch's checkpoint, and random policies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan, random_plan, uniform_plan
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import Profile

CHECKPOINTED_SHARE = 0.15
"""Probability that a random policy with `whole_blocks` runs a replayable block under torch's checkpoint."""


def policy_of_plans(profile: Profile, plans: Sequence[Plan], facts: dict[str, Any] | None = None) -> Policy:
    """Return the policy with `plans[i]` for the i-th block of `profile`, with the predicted memory and time.

    The policy uses the head of `profile`, and `facts` about a solver run, if given. Raises ValueError for a plan that
    cannot be executed.
    """
    distinct = list(dict.fromkeys(plans))
    outcome = simulate(profile, plans)
    return Policy(
        plans=tuple(distinct),
        blocks=tuple((block.name, distinct.index(plan)) for block, plan in zip(profile.blocks, plans, strict=True)),
        predicted_stored_bytes=outcome.stored_bytes,
        predicted_peak_bytes=outcome.peak_bytes,
        predicted_overhead_ms=outcome.overhead_ms,
        predicted_host_bytes=outcome.host_bytes,
        head=profile.head,
        batch=profile.measured[0][0] if profile.measured else (),
        facts=tuple((facts or {}).items()),
    )


def uniform_policy(profile: Profile, action: Action | str, codec: str | None = None) -> Policy:
    """Return the policy with `action` for every activation that allows the action, and RETAIN for the rest.

    With RECOMPUTE, torch's checkpoint runs blocks that cannot be replayed. A value that cannot be recomputed (a mask
    drawn from a user's own generator) is stored with a lossless codec if the profile lists such a codec for the value.
    With COMPRESS, `codec` names the codec. If `codec` is None, each activation gets the first codec that the profile
    lists for the activation. Raises ValueError if the profile does not list `codec` for any activation.
    """
    action = Action.parse(action)
    if action is Action.COMPRESS and codec is not None:
        _check_priced(profile, codec)
    return policy_of_plans(profile, [uniform_plan(profile.kind_of(block), action, codec) for block in profile.blocks])


def checkpoint_policy(profile: Profile) -> Policy:
    """Return the policy that runs each block under torch's checkpoint.

    A block that does not allow torch's checkpoint runs unchanged. `uniform_policy(profile, "recompute")` differs: it
    recomputes each tensor when autograd unpacks it, and frees it after its last use.
    """
    plans = [checkpoint_plan(kind) or plain_plan(kind) for kind in profile.kinds]
    return policy_of_plans(profile, [plans[block.kind] for block in profile.blocks])


def random_policy(
    profile: Profile,
    seed: int,
    actions: Sequence[Action | str] = (Action.RETAIN, Action.RECOMPUTE),
    lossless: bool = False,
    whole_blocks: bool = False,
) -> Policy:
    """Return a policy with a random action for every activation.

    The action is one of `actions` that the activation allows. With `lossless`, only lossless codecs are used. If
    `actions` contains RECOMPUTE, each block that cannot be replayed runs under torch's checkpoint with probability 0.5.
    With `whole_blocks`, each other block runs under torch's checkpoint with probability CHECKPOINTED_SHARE.
    """
    generator = random.Random(seed)
    allowed = [Action.parse(action) for action in actions]
    share = CHECKPOINTED_SHARE if whole_blocks else 0.0
    plans = [random_plan(profile.kind_of(block), generator, allowed, lossless, share) for block in profile.blocks]
    return policy_of_plans(profile, plans)


def _check_priced(profile: Profile, codec: str) -> None:
    values = [value for kind in profile.kinds for value in kind.values]
    options = [option for kind in profile.kinds for value in kind.values for option in kind.codec_options(value.index)]
    priced = sorted({option.codec for option in options})
    if codec in priced:
        return
    names = ", ".join(priced) or "none"
    if any(codec in dict(value.too_coarse) for value in values):
        raise ValueError(
            f"codec={codec!r} degraded the gradient in every measurement of this profile, which has {names}: choose "
            f"one of these"
        )
    raise ValueError(
        f"codec={codec!r} was not priced in this profile, which has {names}: profile again with "
        f"AdaccConfig(codecs=({codec!r},))"
    )
