"""Context function for torch's selective checkpointing that follows an Adacc policy.

The model runs without this package's executor:

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
from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.policy import Action, Plan, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.private import schema_of


def selective_contexts(profile: Profile, policy: Policy) -> Callable[[], tuple[Any, Any]]:
    """Return a `context_fn` for torch.utils.checkpoint that saves the tensors stored by `policy`.

    The results of operators are saved if the policy stores them, but never compressed. All other operators, and all
    in-place operators, are recomputed. In every step, the function must be called once per block call, in the policy's
    order, as Transformers' checkpointing does. Raises PolicyMismatchError if the policy does not belong to the profile.
    """
    kinds = {block.name: profile.kind_of(block) for block in profile.blocks}
    for name, plan in policy.blocks:
        if name not in kinds or kinds[name].digest != policy.plans[plan].kind:
            raise PolicyMismatchError(
                f"the policy's block {name} is not in the profile: solve a policy from this profile"
            )
    stored = cycle([_stored_calls(kinds[name], policy.plans[plan]) for name, plan in policy.blocks])

    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(_SaveCalls(next(stored)))

    return contexts


class _SaveCalls:
    """Policy function for torch's selective checkpointing of one block.

    `stored` lists the operator calls whose results are saved, as (operator, call number).
    """

    def __init__(self, stored: frozenset[tuple[str, int]]) -> None:
        self._stored = stored
        self._forward: Counter[str] = Counter()
        self._backward: Counter[str] = Counter()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts = self._backward if context.is_recompute else self._forward
        call = (str(operator), counts[str(operator)])
        counts[str(operator)] += 1
        # In-place operators are never saved, because their input is read before the change too. Random numbers are
        # drawn again.
        is_saved = call in self._stored and not schema_of(operator).is_mutable
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _stored_calls(kind: KindProfile, plan: Plan) -> frozenset[tuple[str, int]]:
    """Return (operator, call number) for each operator call with a result that `plan` stores."""
    stored_values = {value for value, choice in plan.choices if choice.action is not Action.RECOMPUTE}
    counts: Counter[str] = Counter()
    stored = set()
    for operator in kind.operators:
        if stored_values & set(operator.outputs):
            stored.add((operator.name, counts[operator.name]))
        counts[operator.name] += 1
    return frozenset(stored)
