"""How a model trains until there is a policy."""

from __future__ import annotations

from torch import nn

from adacc_hf.blocks import Checkpointed, Installation
from adacc_hf.config import AdaccConfig
from adacc_hf.head.head import ChunkedHead
from adacc_hf.profiling.idle_blocks import RanBlocks
from adacc_hf.tracking.shapes import BatchShapes


class Waiting(Installation):
    """Every block under torch's own checkpointing, and the head chunked where the config allows no other."""

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self._head = ChunkedHead(model) if config.heads == ("chunked",) else None
        try:
            super().__init__(model, config.block_classes)
        except BaseException:
            self._remove_head()
            raise
        for function in self.blocks.values():
            function.strategy = Checkpointed()
        self.sizes: set[BatchShapes] = set()
        """Those of the batches that came."""
        self._ran = RanBlocks({name: function.block for name, function in self.blocks.items()})

    def begin_step(self) -> None:
        super().begin_step()
        self._ran.names.clear()

    def left_out(self) -> list[str]:
        """Blocks that the last batch did not run; those that it ran beside others' training have nothing to decide."""
        untrained = super().left_out()
        if len(untrained) == len(self.blocks):
            return untrained
        return [name for name in untrained if name not in self._ran.names]

    def remove(self) -> None:
        super().remove()
        self._ran.remove()
        self._remove_head()

    def _remove_head(self) -> None:
        if self._head is not None:
            self._head.remove()
