"""How a model trains until there is a policy."""

from __future__ import annotations

from torch import nn

from adacc_hf.blocks import Checkpointed, Installation
from adacc_hf.compat import layerdrop_rates
from adacc_hf.config import AdaccConfig
from adacc_hf.head.head import ChunkedHead


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
        self.begin_batch()

    def begin_batch(self) -> None:
        """Let the next call of each block be of a new batch."""
        self._calls_before = {name: function.num_calls for name, function in self.blocks.items()}

    def left_out(self) -> list[str]:
        """Blocks that the last batch did not call, as text calls no vision tower; with layerdrop chance decides."""
        if layerdrop_rates(self.model):
            return []
        return [name for name, function in self.blocks.items() if function.num_calls == self._calls_before[name]]

    def remove(self) -> None:
        super().remove()
        self._remove_head()

    def _remove_head(self) -> None:
        if self._head is not None:
            self._head.remove()
