"""The profiled batch: the keyword arguments of a model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes, to_profile_shapes
from adacc_hf.torch_glue.memory import batch_bytes
from adacc_hf.torch_glue.private import tree_leaves, tree_map_only


@dataclass(frozen=True, eq=False)
class Batch:
    """Keyword arguments of a model's forward, labels included. Tensors with a graph, such as `inputs_embeds` of the
    loop, are detached, because a backward of the profile must not free the loop's graph."""

    tensors: Mapping[str, Any]

    def __post_init__(self) -> None:
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(self.tensors)):
            object.__setattr__(self, "tensors", tree_map_only(torch.Tensor, _without_graph, self.tensors))

    @cached_property
    def shapes(self) -> BatchShapes:
        """Names and shapes of the batch's tensors."""
        return batch_shapes(self.tensors)

    @property
    def sizes(self) -> Shapes:
        """Names and shapes of the batch's tensors, in the format of `Profile.measured`."""
        return to_profile_shapes(self.shapes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the storages of all tensors of the batch, each storage counted once."""
        return batch_bytes(self.tensors)

    @property
    def num_tokens(self) -> int:
        """Number of tokens: elements of the largest tensor of shape (samples, length), or 0 without such a tensor."""
        if not isinstance(self.tensors, Mapping):  # the entry of the profiler refuses such a batch in words
            return 0
        return max((prod(shape.size) for shape in self.shapes if len(shape.size) == 2), default=0)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf tensor with the same memory that requires a gradient if `tensor` does."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
