"""The policy rectifier (paper, section 3.4): look at outliers again now and then, re-price, re-solve.

At a tracking step the executor's own encoding counts the outlier channels of every tracked activation and chooses them
anew; between tracking steps nothing is counted and nothing synchronises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from adacc_hf.config import AdaccConfig
from adacc_hf.errors import InfeasibleBudgetError
from adacc_hf.kernels.codecs import Codec, Payload, get_codec
from adacc_hf.kernels.outlier_int4 import count_outliers
from adacc_hf.policy import Policy
from adacc_hf.solver import Budget, solve_policy

if TYPE_CHECKING:
    from torch import Tensor

    from adacc_hf.executor import PolicyHandle
    from adacc_hf.profile import KindProfile, Profile, Value

MIN_GAIN = 0.02
"""A new policy is taken over if it saves this share of the overhead, or if the old one no longer keeps to the budget.
Prices vary by a few percent from one profile to the next; a smaller gain is noise."""

OUTLIER_CODEC = "outlier_int4"


def is_tracking_step(steps_since: int, tracking: str | int) -> bool:
    """Whether outliers are looked at `steps_since` steps after the policy was set: 1, 2, 4, ... if "exponential"."""
    if tracking == "off" or steps_since < 1:
        return False
    if tracking == "exponential":
        return steps_since & (steps_since - 1) == 0
    return steps_since % int(tracking) == 0


class CountingCodec:
    """An outlier codec that counts the outliers of what it encodes, and chooses its channels anew."""

    def __init__(self, codec: Codec, threshold: float, counts: dict[Any, int], key: Any) -> None:
        self._codec = codec
        self._threshold = threshold
        self._counts = counts
        self._key = key

    def encode(self, tensor: Tensor) -> Payload:
        count = count_outliers(tensor, self._threshold)
        self._counts[self._key] = max(count, self._counts.get(self._key, 0))
        self._codec.fit(tensor)
        return self._codec.encode(tensor)

    def decode(self, payload: Payload) -> Tensor:
        return self._codec.decode(payload)


@dataclass(frozen=True, kw_only=True)
class Rectification:
    """What one tracking step found."""

    num_outliers: dict[str, int]
    """Outlier channels of each tracked activation, the most over all blocks of its kind."""
    policy: Policy | None
    """A better policy, or None to keep the one in force."""
    reason: str


class Rectifier:
    """Keeps a policy in step with the data.

    Between steps: `start_tracking(handle)` before a tracking step, `finish_tracking(handle)` after it.
    """

    def __init__(
        self, profile: Profile, policy: Policy, config: AdaccConfig, memory_budget: str | float | int | None = None
    ) -> None:
        self.profile = profile
        self.policy = policy
        self.config = config
        self.memory_budget = config.memory_budget if memory_budget is None else memory_budget
        self._counts: dict[tuple[int, int], int] = {}

    def has_work(self) -> bool:
        """Whether any tracked activation is compressed with outliers kept apart."""
        return self.config.outliers and any(
            choice.codec == OUTLIER_CODEC for plan in self.policy.plans for _, choice in plan.choices
        )

    def start_tracking(self, handle: PolicyHandle) -> None:
        """Have the next forward count outliers."""
        self._counts = {}
        for block in self.profile.blocks:
            kind = self.profile.kinds[block.kind]
            handle.wrap_codecs(block.name, self._counting(block.kind, kind))

    def finish_tracking(self, handle: PolicyHandle) -> Rectification:
        """Stop counting, put the counts into the prices and solve again."""
        for block in self.profile.blocks:
            handle.wrap_codecs(block.name, None)
        found = {self._name(kind, value): count for (kind, value), count in self._counts.items()}
        repriced = _with_outliers(self.profile, self._counts)
        if repriced == self.profile:
            return Rectification(num_outliers=found, policy=None, reason="outliers as before")
        self.profile = repriced
        try:
            candidate = solve_policy(repriced, self.memory_budget, self.config)
        except InfeasibleBudgetError as error:
            return Rectification(num_outliers=found, policy=None, reason=f"no policy fits any more: {error}")
        policy, reason = self._judged(candidate)
        if policy.plans == self.policy.plans:
            return Rectification(num_outliers=found, policy=None, reason=reason)
        self.policy = policy
        return Rectification(num_outliers=found, policy=policy, reason=reason)

    def _judged(self, candidate: Policy) -> tuple[Policy, str]:
        """The policy to follow from now on, and why: `candidate`, or today's actions with as many channels as found."""
        current = self._current_policy()
        budget = Budget.resolve(self.memory_budget, self.profile, self.config)
        needed = current.predicted_peak_bytes if budget.of_peak else current.predicted_stored_bytes
        if needed > budget.nbytes:
            return candidate, f"more outliers: the old actions would need {needed} of {budget.nbytes} bytes"
        gain = current.predicted_overhead_ms - candidate.predicted_overhead_ms
        if gain > MIN_GAIN * current.predicted_overhead_ms:
            return candidate, f"{gain:.2f} ms of {current.predicted_overhead_ms:.2f} ms overhead gained"
        return current, "the same actions, with the channels there are now"

    def _current_policy(self) -> Policy:
        """The actions in force, with today's outlier channels and prices."""
        plans = []
        for block in self.profile.blocks:
            kind = self.profile.kinds[block.kind]
            plan = self.policy.plan_of(block.name)
            plans.append(replace(plan, choices=tuple((v, _repriced(kind, v, c)) for v, c in plan.choices)))
        return Policy.build(self.profile, plans, dict(self.policy.facts))

    def _counting(self, kind_index: int, kind: KindProfile) -> Any:
        def wrap(value: int, codec: Codec) -> Codec | CountingCodec:
            if codec.name != OUTLIER_CODEC or not self._tracks(kind.values[value]):
                return codec
            return CountingCodec(codec, self.config.zscore_threshold, self._counts, (kind_index, value))

        return wrap

    def _tracks(self, value: Value) -> bool:
        patterns = self.config.tracked_modules
        return patterns is None or any(fnmatch(value.name.partition(":")[0], pattern) for pattern in patterns)

    def _name(self, kind: int, value: int) -> str:
        record = self.profile.kinds[kind]
        return f"{record.block_class}.{record.values[value].name}#{value}"


def _with_outliers(profile: Profile, counts: dict[tuple[int, int], int]) -> Profile:
    """`profile` with the outlier codec of each counted activation priced for as many channels as were found."""
    kinds = list(profile.kinds)
    for (kind_index, value_index), count in counts.items():
        kind = kinds[kind_index]
        values = list(kind.values)
        values[value_index] = _value_with_outliers(values[value_index], count)
        kinds[kind_index] = replace(kind, values=tuple(values))
    return replace(profile, kinds=tuple(kinds))


def _value_with_outliers(value: Value, count: int) -> Value:
    import torch

    def reprice(option: Any) -> Any:
        if option.codec != OUTLIER_CODEC:
            return option
        codec = get_codec(option.codec, **(dict(option.options) | {"num_outliers": count}))
        nbytes = codec.predicted_bytes(value.encoded_shape, getattr(torch, value.dtype))
        return replace(option, options=tuple(sorted(codec.options.items())), nbytes=nbytes)

    return replace(value, codecs=tuple(reprice(option) for option in value.codecs))


def _repriced(kind: KindProfile, value: int, choice: Any) -> Any:
    """`choice` with its codec's options of today."""
    if choice.codec is None:
        return choice
    option = next(option for option in kind.values[value].codecs if option.codec == choice.codec)
    return replace(choice, options=option.options)
