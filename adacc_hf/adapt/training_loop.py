"""TrainingLoop and SessionAdapter: base classes of the adapters that connect an AdaccSession to other trainers.

TrainingLoop itself is for a user's own loop. The subclass of TrainingLoop for the Trainer is in
`callbacks/trainer_loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import describe_value
from adacc_hf.torch_glue.distributed import is_first_rank

if TYPE_CHECKING:
    from adacc_hf.adapt.first_policy import PolicySource
    from adacc_hf.adapt.session import AdaccSession


class TrainingLoop:
    """Properties of a user's own training loop."""

    num_unrecorded_steps = 0
    """Number of first steps that differ from later ones, so that no micro-batch of them is profiled."""

    def __init__(self, num_micro: int = 1, folder: str | None = None) -> None:
        self.num_micro = num_micro
        """Micro-batches per step. In a user's own loop, the number of micro-batches in the previous step, or a guess in
        the first step."""
        self.folder = folder
        """Folder for the run's policy, profile and history. None writes no files."""

    @property
    def recorded_micro_batch(self) -> int:
        """Number of the micro-batch that is profiled, counted from 1: the second finds gradients."""
        return min(2, self.num_micro)

    @property
    def precision(self) -> str:
        """Mixed precision of the loop, such as "bf16", or "" if it is not known before the first step."""
        return ""

    @property
    def clips(self) -> bool:
        """True if gradients may be clipped before the optimizer's step."""
        return True

    @property
    def is_first_rank(self) -> bool:
        """True on the first rank, which writes the run's files."""
        return is_first_rank()

    def num_prefetched(self, device: torch.device) -> int:
        """Return the number of batches that the loop has already moved to `device` for later steps."""
        return 0

    def num_before_step(self, device: torch.device) -> int:
        """Return the number of batches on `device` when a step begins.

        The measured memory of a step does not include these batches.
        """
        return int(device.type == "cpu")

    def postpones_exchange(self, model: nn.Module) -> bool:
        """Return True if ranks exchange gradients only in the last micro-batch of a step."""
        return False


class SessionAdapter:
    """Base class of the callbacks that connect a trainer to an AdaccSession, such as AdaccCallback.

    The class holds the callback's settings, and gives access to the policy and the history of the current run.
    """

    def __init__(self, config: AdaccConfig | None, policy: PolicySource | None, overrides: dict[str, Any]) -> None:
        self.config = checked_config(type(self).__name__, config, policy, overrides)
        self._source = policy
        self._session: Any = None
        """The session of the current run, or of the last run. None only before the first event of a run."""

    @property
    def session(self) -> AdaccSession | None:
        """The AdaccSession of the current run, or of the last run. None before the first run."""
        return self._session

    @property
    def policy(self) -> Policy | None:
        """The current policy, or None before the first policy is set."""
        return None if self.session is None else self.session.policy

    @property
    def profile(self) -> Profile | None:
        """The profile that the current policy was solved for, or None if the policy was passed in as a Policy or
        file."""
        return None if self.session is None else self.session.profile

    @property
    def history(self) -> list[dict[str, Any]]:
        """Events of the run: dicts of `step`, `event` ("policy", "tracking", "change", "guard", "memory", "fallback")
        and the event's own values. A "fallback" event counts the steps that did not follow the policy for one reason. A
        resumed run continues the history of its checkpoint."""
        return [] if self.session is None else self.session.history

    @property
    def _is_policy_given(self) -> bool:
        """True if the user passed a Policy or a file. This policy is used even if a checkpoint contains another
        policy."""
        return isinstance(self._source, (str, Path, Policy))

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({self.config.describe_changes()})"
        return text if self.policy is None else f"<{text}: {self.policy.describe()}>"


def checked_config(owner: str, config: Any, policy: Any, overrides: dict[str, Any]) -> AdaccConfig:
    """Return `config` with some fields replaced by `overrides`. A `config` of None means the defaults.

    Raises TypeError, whose message names the class `owner`, if `config` is not an AdaccConfig, or if `policy` is not a
    Policy, path or function.
    """
    if config is not None and not isinstance(config, AdaccConfig):
        by_name = "**settings" if isinstance(config, Mapping) else "memory_budget=0.5"
        raise TypeError(
            f"config={config!r} is not an AdaccConfig: give settings by name, as in {owner}(..., {by_name}), or pass "
            f"AdaccConfig({by_name})"
        )
    if policy is not None and not isinstance(policy, (str, Path, Policy)) and not callable(policy):
        raise TypeError(
            f"{describe_value('policy', policy)}: give a Policy, the path of a file that Policy.save wrote, or a "
            f"function that makes a Policy of a Profile"
        )
    return (config or AdaccConfig()).with_overrides(**overrides)
