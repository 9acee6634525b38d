"""A policy for torch's own selective checkpointing: its decisions without this package's executor.

contexts = selective_contexts(profile, policy)
model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from adacc_hf.artifacts.errors import PolicyMismatchError
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import KindProfile, Profile
from adacc_hf.torch_glue.private import schema_of


def selective_contexts(profile: Profile, policy: Policy) -> Callable[[], tuple[Any, Any]]:
    """A `context_fn` for torch.utils.checkpoint that saves what `policy` stores.

    Operators whose results are stored are saved, whole where the policy would compress them, and all others are run
    again, those that work in place in any case. The function must be called once per call of a block, in
    the policy's order, in every step: that is what Transformers' checkpointing does. Raises PolicyMismatchError if the
    policy is not one for the profile.
    """
    kinds = {block.name: profile.kind_of(block) for block in profile.blocks}
    for name, plan in policy.blocks:
        if name not in kinds or kinds[name].digest != policy.plans[plan].kind:
            raise PolicyMismatchError(f"the policy's block {name} is not one of the profile: solve a policy from it")
    stored = cycle([_stored_calls(kinds[name], policy.plans[plan]) for name, plan in policy.blocks])

    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(_SaveCalls(next(stored)))

    return contexts


class _SaveCalls:
    """The policy function of one call of a block: saves the calls in `stored`, of which it counts each operator's."""

    def __init__(self, stored: frozenset[tuple[str, int]]) -> None:
        self._stored = stored
        self._forward: Counter[str] = Counter()
        self._backward: Counter[str] = Counter()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts = self._backward if context.is_recompute else self._forward
        call = (str(operator), counts[str(operator)])
        counts[str(operator)] += 1
        # What is changed in place is read as it was before too: its random numbers are drawn again instead.
        is_saved = call in self._stored and not schema_of(operator).is_mutable
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _stored_calls(kind: KindProfile, plan: Plan) -> frozenset[tuple[str, int]]:
    """The operators whose results are stored, each with how many of its name ran before it."""
    kept = {value for value, choice in plan.choices if choice.action is not Action.RECOMPUTE}
    counts: Counter[str] = Counter()
    stored = set()
    for operator in kind.operators:
        if kept & set(operator.outputs):
            stored.add((operator.name, counts[operator.name]))
        counts[operator.name] += 1
    return frozenset(stored)
