"""Baseline policies from the paper, without a solver: the greedy rule of Table 1, "Quantization", torch's checkpoint.

The optimization bandwidth of an action on an activation is the number of bytes freed per ms of extra time. The greedy
rule gives each activation the action with the higher bandwidth, and changes the activations with the highest bandwidths
first. The rule neglects shared costs: a replay that computes two activations counts twice. The solver's search includes
the greedy policies, so the solver's policy is never slower than a greedy policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from adacc_hf.artifacts.memory_simulator import Outcome, simulate_policy
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Action, Choice, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.milp import KindModel, PricedPlan, StoredForm, price
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Optimization bandwidths of one activation: bytes that recomputing or compressing frees per ms of extra time.

    The bandwidth of an action that is not available is None.
    """

    value: int
    recompute_ms: float | None
    recompute: float | None
    """Bytes freed per ms by recomputing the activation: the paper's Band_recomp."""
    store: StoredForm | None
    """Stored form, other than the tensor itself, that frees the most bytes per ms. None if no codec is available."""
    compress: float | None
    """Bytes freed per ms by compressing the activation: the paper's Band_comp."""

    @property
    def best(self) -> float | None:
        """Bytes freed per ms by the better of the two actions, recompute and compress.

        None if the activation can be neither recomputed nor compressed.
        """
        return max((band for band in (self.recompute, self.compress) if band is not None), default=None)

    @property
    def choice(self) -> Choice:
        """Action of the greedy rule: the action that frees more bytes per ms, or RETAIN if no action is available."""
        if self.best is None:
            return RETAIN
        return RECOMPUTE if self.store is None or self.best == self.recompute else self.store.choice


def bandwidths(model: KindModel) -> list[Bandwidths]:
    """Return, for every activation of a kind of block, the bytes that each action frees per ms of extra time."""
    rows = []
    for value in model.kind.activations:
        ms = replay_ms(model, value.index) if value.saved else None
        codecs = [store for store in model.menus[value.index][1:] if value.saved]
        best = max(codecs, key=partial(_freed_per_ms, value.nbytes), default=None)
        rows.append(
            Bandwidths(
                value=value.index,
                recompute_ms=ms,
                recompute=None if ms is None else _freed_bytes_per_ms(value.nbytes, ms),
                store=best,
                compress=None if best is None else _freed_per_ms(value.nbytes, best),
            )
        )
    return rows


def _freed_per_ms(nbytes: int, store: StoredForm) -> float:
    """Return the bytes freed per ms of encoding and decoding if a value of `nbytes` is stored in the form `store`."""
    return _freed_bytes_per_ms(nbytes - store.nbytes, store.ms)


def _freed_bytes_per_ms(nbytes: int, ms: float) -> float:
    return nbytes / ms if ms else math.inf


def replay_ms(model: KindModel, value: int) -> float | None:
    """Return the time in ms to recompute one activation while all others are stored.

    Return None if `value` cannot be recomputed.
    """
    if model.recompute(value) is None:
        return None
    return price(model, {**dict.fromkeys(model.menus, RETAIN), value: RECOMPUTE}).ms


def greedy_policies(profile: Profile, models: Sequence[KindModel]) -> Iterator[list[PricedPlan]]:
    """Yield the policies of the greedy rule, starting with RETAIN for all activations.

    Each policy changes one more activation of one block than the previous policy. The first blocks are changed first,
    as in `frontier.chain`. No policy is faster than the policies before it, because each change adds replay, or
    encoding and decoding.
    """
    choices = [dict.fromkeys(model.menus, RETAIN) for model in models]
    policy = [price(models[block.kind], choices[block.kind]) for block in profile.blocks]
    yield list(policy)
    rows = [(kind, row) for kind, model in enumerate(models) for row in bandwidths(model)]
    changes = [(row.best, kind, row) for kind, row in rows if row.best is not None and row.choice != RETAIN]
    for _, kind, row in sorted(changes, key=lambda change: -change[0]):
        choices[kind][row.value] = row.choice
        plan = price(models[kind], choices[kind])
        for i, block in enumerate(profile.blocks):
            if block.kind == kind:
                policy[i] = plan
                yield list(policy)


# The paper's "Quantization" baseline: one codec for all activations, regardless of its cost.


def quantize_everything(profile: Profile) -> Policy:
    """Return the policy that compresses each activation that INT4 (per token) supports, and retains the rest."""
    from adacc_hf.kernels.codecs import baseline_codec

    return uniform_policy(profile, Action.COMPRESS, codec=baseline_codec())


# A step under torch's checkpoint around every block, from the same profile as a policy's step.
# `uniform_policy(profile, "recompute")` differs from it: that policy recomputes each tensor when autograd unpacks it,
# and frees it after its last use.


def simulate_checkpointed(profile: Profile) -> Outcome:
    """Return the simulated outcome of a step in which torch's checkpoint runs every block that can be checkpointed."""
    return simulate_policy(profile, checkpoint_policy(profile))
