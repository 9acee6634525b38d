"""FullRecompute: torch's checkpoint on all blocks until a batch that calls every block can be profiled."""

from __future__ import annotations

from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.head.head import ChunkedHead
from adacc_hf.price.idle_blocks import ExecutedBlocks, describe_uncalled
from adacc_hf.run.blocks import CheckpointStrategy, Installation
from adacc_hf.torch_glue.batch_shapes import BatchShapes
from adacc_hf.torch_glue.distributed import gather_from_all_ranks

MOST_STEPS = 64
"""Most steps to wait for a batch that calls every block, else an error is raised.

If one batch in eight has an image, no image comes in 64 steps with a probability of 1 in 5,000.
"""


def is_ready(installation: FullRecompute, num_waited: int) -> bool:
    """Return True if the most recent batch of every rank called all blocks, so that it can be profiled.

    Raises UncalledBlocksError if not, and if training has waited for MOST_STEPS steps (`num_waited`) or more.
    """
    skipped_blocks = installation.skipped_blocks()
    if all(gather_from_all_ranks(not skipped_blocks)):
        return True
    if num_waited >= MOST_STEPS:
        raise UncalledBlocksError(describe_uncalled(installation, skipped_blocks, f"by the last of {num_waited} steps"))
    return False


class FullRecompute(Installation):
    """Every block under torch's own checkpoint. The head is chunked if the config allows no other head."""

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self._head = ChunkedHead(model) if config.heads == ("chunked",) else None
        try:
            super().__init__(model, config.block_classes)
        except BaseException:
            self._remove_head()
            raise
        for function in self.blocks.values():
            function.strategy = CheckpointStrategy()
        self.sizes: set[BatchShapes] = set()
        """Shapes of the batches so far."""
        self._executed = ExecutedBlocks(self.modules)

    def begin_step(self) -> None:
        super().begin_step()
        self._executed.names.clear()

    def skipped_blocks(self) -> list[str]:
        """Return the blocks that the most recent batch did not call.

        Blocks that ran without gradients while others trained are left out, because they have nothing to store.
        """
        untrained = super().skipped_blocks()
        if len(untrained) == len(self.blocks):
            return untrained
        return [name for name in untrained if name not in self._executed.names]

    def remove(self) -> None:
        super().remove()
        self._executed.remove()
        self._remove_head()

    def _remove_head(self) -> None:
        if self._head is not None:
            self._head.remove()
