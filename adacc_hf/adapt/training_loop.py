"""TrainingLoop: properties of a training loop that a session needs. The settings that a session accepts.

The subclass of TrainingLoop for the Trainer is in `callbacks/trainer_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.setting_checks import describe_value
from adacc_hf.torch_glue.distributed import is_first_rank

PolicySource = Policy | str | Path | Callable[[Profile], Policy]


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
    def is_first_rank(self) -> bool:
        """True on the first rank, which writes the run's files."""
        return is_first_rank()

    def num_prefetched(self, device: torch.device) -> int:
        """Return the number of batches that the loop has already moved to `device` for later steps."""
        return 0

    def num_before_step(self, device: torch.device) -> int:
        """Return the number of batches on `device` when a step begins, which its measured memory does not include."""
        return int(device.type == "cpu")

    def postpones_exchange(self, model: nn.Module) -> bool:
        """Return True if ranks exchange gradients only in the last micro-batch of a step."""
        return False


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
