"""The partitioner as torch's setting, for models that are compiled by someone else."""

from __future__ import annotations

import torch
from torch._inductor import config as inductor

from adacc_hf.partitioner.partitioner import AdaccPartitioner


class InstalledPartitioner:
    """Cuts every region that Inductor compiles, until it is removed.

    Code that was compiled before is dropped, and so is what was compiled meanwhile when it is removed: torch compiles
    it again when it is called. Raises ValueError if torch has a partitioner of the user's.
    """

    def __init__(self, partitioner: AdaccPartitioner) -> None:
        if inductor.custom_partitioner_fn is not None:
            raise ValueError(
                f"torch._inductor.config.custom_partitioner_fn={inductor.custom_partitioner_fn!r} is set: Adacc is "
                f"such a partitioner itself, and two cannot cut one graph; set it to None"
            )
        self.partitioner = partitioner
        inductor.custom_partitioner_fn = partitioner
        self.compile_again()

    def compile_again(self) -> None:
        """Let everything be compiled anew at its next call."""
        torch._dynamo.reset()

    def remove(self) -> None:
        """Harmless when removed already."""
        if inductor.custom_partitioner_fn is self.partitioner:
            inductor.custom_partitioner_fn = None
            self.compile_again()
