"""Policies that need no solver: given plans, one action for all activations, torch's checkpoint, random actions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from adacc_hf.artifacts.memory_simulator import simulate
from adacc_hf.artifacts.plans import checkpoint_plan, plain_plan, random_plan, uniform_plan
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import Profile

CHECKPOINTED_SHARE = 0.15
"""Share of the replayable blocks that torch's checkpoint runs under a random policy with `whole_blocks`."""


def policy_of_plans(profile: Profile, plans: Sequence[Plan], facts: dict[str, Any] | None = None) -> Policy:
    """Return the policy that gives `plans[i]` to the i-th block of `profile`, with its head and its predicted cost.

    Raises ValueError for a plan that cannot be carried out.
    """
    distinct = list(dict.fromkeys(plans))
    outcome = simulate(profile, plans)
    return Policy(
        plans=tuple(distinct),
        blocks=tuple((block.name, distinct.index(plan)) for block, plan in zip(profile.blocks, plans, strict=True)),
        predicted_stored_bytes=outcome.stored_bytes,
        predicted_peak_bytes=outcome.peak_bytes,
        predicted_overhead_ms=outcome.overhead_ms,
        head=profile.head,
        batch=profile.measured[0][0] if profile.measured else (),
        facts=tuple((facts or {}).items()),
    )


def uniform_policy(profile: Profile, action: Action | str, codec: str | None = None) -> Policy:
    """Return the policy that gives `action` to every activation that can take it, and RETAIN to the others.

    With RECOMPUTE, torch's checkpoint runs blocks that cannot be replayed. A value that cannot be recomputed (a mask
    drawn from a generator of the user's own) is stored by a lossless codec if one was priced.
    With COMPRESS, `codec` is the codec. None takes the first priced codec of each activation. Raises ValueError for a
    codec that was not priced for any activation.
    """
    action = Action.parse(action)
    if action is Action.COMPRESS and codec is not None:
        _check_priced(profile, codec)
    return policy_of_plans(profile, [uniform_plan(profile.kind_of(block), action, codec) for block in profile.blocks])


def checkpoint_policy(profile: Profile) -> Policy:
    """Return the policy that runs every block under torch's checkpoint if it allows that, and plainly if not."""
    plans = [checkpoint_plan(kind) or plain_plan(kind) for kind in profile.kinds]
    return policy_of_plans(profile, [plans[block.kind] for block in profile.blocks])


def random_policy(
    profile: Profile,
    seed: int,
    actions: Sequence[Action | str] = (Action.RETAIN, Action.RECOMPUTE),
    lossless: bool = False,
    whole_blocks: bool = False,
) -> Policy:
    """Return a policy with a random action out of `actions` for every activation, each where it can take it.

    With `lossless`, COMPRESS takes lossless codecs only. With RECOMPUTE among the actions, torch's checkpoint runs half
    of the blocks that cannot be replayed and, with `whole_blocks`, some of the others.
    """
    generator = random.Random(seed)
    allowed = [Action.parse(action) for action in actions]
    share = CHECKPOINTED_SHARE if whole_blocks else 0.0
    plans = [random_plan(profile.kind_of(block), generator, allowed, lossless, share) for block in profile.blocks]
    return policy_of_plans(profile, plans)


def _check_priced(profile: Profile, codec: str) -> None:
    values = [value for kind in profile.kinds for value in kind.values]
    priced = sorted({option.codec for value in values for option in value.codecs})
    if codec in priced:
        return
    names = ", ".join(priced) or "none"
    if any(codec in dict(value.too_coarse) for value in values):
        raise ValueError(
            f"codec={codec!r} would degrade gradients wherever it was tried, so that this profile has {names}: choose "
            f"one of these"
        )
    raise ValueError(
        f"codec={codec!r} was not priced in this profile, which has {names}: profile again with "
        f"AdaccConfig(codecs=({codec!r},))"
    )
