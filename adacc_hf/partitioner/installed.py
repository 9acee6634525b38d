"""The partitioner as torch's setting, for models that are compiled by someone else."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor

from adacc_hf.partitioner.partitioner import AdaccPartitioner
from adacc_hf.partitioner.region import CompiledPolicy
from adacc_hf.policy import Choice
from adacc_hf.units import format_bytes

log = logging.getLogger(__name__)


class InstalledPartitioner:
    """Cuts every region that Inductor compiles, until it is removed.

    Code that was compiled before is dropped, and so is what was compiled meanwhile when it is removed: torch compiles
    it again when it is called. AOTAutograd's cache, which would bring back partitioned graphs without their plans, is
    off meanwhile; Inductor's, which has the code of each graph, is not (see `plan_store`). Raises ValueError if torch
    has a partitioner of the user's.
    """

    def __init__(self, partitioner: AdaccPartitioner) -> None:
        if inductor.custom_partitioner_fn is not None:
            raise ValueError(
                f"torch._inductor.config.custom_partitioner_fn={inductor.custom_partitioner_fn!r} is set: Adacc is "
                f"such a partitioner itself, and two cannot cut one graph; set it to None"
            )
        self.partitioner = partitioner
        inductor.custom_partitioner_fn = partitioner
        self._cache_was_on, functorch_config.enable_autograd_cache = functorch_config.enable_autograd_cache, False
        self._num_counted = 0
        self._num_seen = 0
        self._seen: list[CompiledPolicy] = []
        """The policies whose code was looked at."""
        self.compile_again()

    def compile_again(self) -> None:
        """Let everything be compiled anew at its next call."""
        self._num_counted = self._num_seen = 0
        torch._dynamo.reset()

    def count_calls(self, loss: Tensor) -> None:
        """Let the policy know how often each region is called, if regions were compiled since it was counted last."""
        num_regions = len(self.partitioner.policy.regions)
        if loss.grad_fn is not None and num_regions != self._num_counted:
            self.partitioner.count_calls(loss)
            self._num_counted = num_regions

    def look_at_code(self) -> None:
        """After a step whose calls were counted: let the policy know what the code has live, if there is new code."""
        num_regions = len(self.partitioner.policy.regions)
        if num_regions == self._num_counted != self._num_seen:
            self.partitioner.look_at_code()
            self._num_seen = num_regions
            self._seen.append(self.partitioner.policy)

    def keep_lowest(self) -> bool:
        """Go back to the code with the lowest peak of all for this share or larger ones, if this code has no lower one.

        How Inductor orders and fuses what a plan leaves to it is known from its code only, and can cost more than the
        plan saves. What was made for a larger share takes less time, too. True if all must be compiled again for that.
        """
        policy = self.partitioner.policy
        others = [seen for seen in self._seen if seen.code_bytes is not None and _share(seen) >= _share(policy)]
        if policy.code_bytes is None or not others:
            return False
        lowest = min(others, key=lambda seen: seen.code_bytes)
        if lowest.code_bytes > policy.code_bytes or _stored(lowest) == _stored(policy):
            return False
        log.info(
            "Adacc: the code for a share of %.3f would have up to %s live in a step, and that for %.3f only %s: the "
            "latter is taken",
            _share(policy),
            format_bytes(policy.code_bytes),
            _share(lowest),
            format_bytes(lowest.code_bytes),
        )
        self.partitioner.start_over(lowest.share, lowest.regions)
        self.compile_again()
        return True

    def remove(self) -> None:
        """Harmless when removed already."""
        if inductor.custom_partitioner_fn is self.partitioner:
            inductor.custom_partitioner_fn = None
            functorch_config.enable_autograd_cache = self._cache_was_on
            self.compile_again()


def _share(policy: CompiledPolicy) -> float:
    """The fraction that regions were allowed; 0 for the least possible."""
    return 0.0 if policy.share is None else policy.share


def _stored(policy: CompiledPolicy) -> list[tuple[tuple[str, Choice], ...]]:
    return [plan.stored for plan in policy.regions]
