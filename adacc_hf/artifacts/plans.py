"""Plans of one block that need no solver: plain, checkpointed, with one action for all activations, or random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, BlockAction, Choice, Plan

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile, Value


def checkpoint_plan(kind: KindProfile, codecs: Mapping[int, Choice] | None = None) -> Plan | None:
    """Return the plan that checkpoints a block of `kind` and compresses the inputs in `codecs`, by value index.

    Return None if the kind does not allow torch's checkpoint (`KindProfile.block_actions`).
    """
    if BlockAction.CHECKPOINT not in kind.block_actions:
        return None
    codecs = codecs or {}
    inputs = {value.index for value in kind.inputs}
    return Plan(
        kind=kind.digest,
        choices=tuple(
            (v.index, codecs.get(v.index, RETAIN) if v.index in inputs else RECOMPUTE) for v in kind.activations
        ),
        is_checkpointed=True,
        places=tuple((value, kind.values[value].place) for value in codecs),
        tiling=kind.tiling,
    )


def plain_plan(kind: KindProfile) -> Plan:
    """Return the plan that retains all activations of a block of `kind`."""
    return Plan(
        kind=kind.digest, choices=tuple((value.index, RETAIN) for value in kind.activations), tiling=kind.tiling
    )


def recompute_plan(kind: KindProfile) -> Plan:
    """Return the plan that recomputes all recomputable values. A block that cannot be replayed is checkpointed."""
    return uniform_plan(kind, Action.RECOMPUTE, None)


def uniform_plan(kind: KindProfile, action: Action, codec: str | None) -> Plan:
    """Return the plan that gives `action` to each activation that allows the action. See `uniform_policy`."""
    must_run_again = BlockAction.PLAIN not in kind.block_actions
    checkpointed = checkpoint_plan(kind)
    if checkpointed is not None and (must_run_again or (kind.untrusted and action is Action.RECOMPUTE)):
        return checkpointed

    def choose(value: Value) -> Choice:
        if action is Action.RECOMPUTE:
            lossless = [Choice.compress(option) for option in value.codecs if option.lossless]
            return RECOMPUTE if value.recomputable else next(iter(lossless), RETAIN)
        if action is Action.COMPRESS:
            named = [option for option in kind.codec_options(value.index) if option.codec == codec]
            options = value.codecs if codec is None else named
            if options:
                return Choice.compress(options[0])
        return RETAIN

    choices = tuple((value.index, choose(value)) for value in kind.activations)
    return Plan(kind=kind.digest, choices=choices, tiling=kind.tiling)


def random_plan(
    kind: KindProfile, generator: random.Random, allowed: Sequence[Action], lossless: bool, checkpoint_share: float
) -> Plan:
    """Return a plan with random actions chosen from `allowed`. See `random_policy`.

    `checkpoint_share` is the probability of torch's checkpoint for a block that could be replayed, 0.5 for others.
    """
    checkpointed = checkpoint_plan(kind)
    if BlockAction.PLAIN not in kind.block_actions and checkpointed is not None:
        return checkpointed
    share = 0.5 if kind.untrusted else checkpoint_share
    if share and checkpointed is not None and Action.RECOMPUTE in allowed and generator.random() < share:
        return checkpointed
    choices, lossy_values = {}, set()
    for value in kind.activations:
        options = [option for option in kind.codec_options(value.index) if option.lossless or not lossless]
        candidates = [RETAIN] if Action.RETAIN in allowed else []
        if Action.RECOMPUTE in allowed and value.recomputable:
            candidates.append(RECOMPUTE)
        if Action.COMPRESS in allowed:
            candidates += [Choice.compress(option) for option in options]
        choices[value.index] = generator.choice(candidates) if candidates else RETAIN
        if choices[value.index] in [Choice.compress(option) for option in options if not option.lossless]:
            lossy_values.add(value.index)
    # Values that must not be recomputed from lossily stored values are retained instead.
    exact_values = kind.exactness_dependents_of(lossy_values)
    retained = [v for v in exact_values if choices.get(v) == RECOMPUTE]
    choices |= dict.fromkeys(retained, RETAIN)
    return Plan(kind=kind.digest, choices=tuple(choices.items()), tiling=kind.tiling)
