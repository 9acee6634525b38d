"""Sizes of a run's current micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes
from adacc_hf.torch_glue.memory import batch_bytes


class MicroBatches:
    """Sizes of a run's current micro-batch.

    The sizes are read when a micro-batch begins or, if its tensors do not exist yet, when the model is called.
    """

    def __init__(self) -> None:
        self.shapes: BatchShapes = ()
        self.nbytes = 0
        """Bytes of the tensors in the current or last micro-batch."""
        self.has_shapes = False
        """True if `shapes` belong to the current or last micro-batch. False before the tensors of the current
        micro-batch are known."""
        self._sizes: list[tuple[str, torch.Size]] = []

    @property
    def known_shapes(self) -> BatchShapes | None:
        """Shapes of the current or last micro-batch, or None before the micro-batch's tensors are known."""
        return self.shapes if self.has_shapes else None

    def begin(self) -> None:
        """Begin the next micro-batch."""
        self.has_shapes = False

    def read_shapes(self, inputs: Any) -> bool:
        """Read the micro-batch's shapes from the tensors in the mapping `inputs`, and return True. Return False if the
        shapes are known already, or if `inputs` is not a mapping.

        In reinforcement learning, the tensors are sampled within the step, so they do not always exist when the
        micro-batch begins.
        """
        if self.has_shapes or not isinstance(inputs, Mapping):
            return False
        sizes = [(name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        if sizes != self._sizes:  # skipped for equal sizes: `batch_shapes` takes time
            self._sizes, self.shapes, self.nbytes = sizes, batch_shapes(inputs), batch_bytes(inputs)
        self.has_shapes = True
        return True
