"""The partitioner as torch's setting, for models that are compiled by someone else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor

from adacc_hf.partitioner.partitioner import AdaccPartitioner


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
        self.compile_again()

    def compile_again(self) -> None:
        """Let everything be compiled anew at its next call."""
        self._num_counted = 0
        torch._dynamo.reset()

    def count_calls(self, loss: Tensor) -> None:
        """Let the policy know how often each region is called, if regions were compiled since it was counted last."""
        num_regions = len(self.partitioner.policy.regions)
        if loss.grad_fn is not None and num_regions != self._num_counted:
            self.partitioner.count_calls(loss)
            self._num_counted = num_regions

    def remove(self) -> None:
        """Harmless when removed already."""
        if inductor.custom_partitioner_fn is self.partitioner:
            inductor.custom_partitioner_fn = None
            functorch_config.enable_autograd_cache = self._cache_was_on
            self.compile_again()
