"""The profiled batch, and the training step around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.torch_glue.batch_shapes import batch_shapes
from adacc_hf.torch_glue.memory import batch_bytes
from adacc_hf.torch_glue.private import tree_leaves, tree_map_only


@dataclass(frozen=True, eq=False)
class Batch:
    """Keyword arguments of a model's forward, labels included. Tensors with a graph, such as `inputs_embeds` of the
    loop, are detached, because a backward of the profile must not free the loop's graph."""

    tensors: Mapping[str, Any]

    def __post_init__(self) -> None:
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(self.tensors)):
            leaves = tree_map_only(
                torch.Tensor, lambda t: t.detach().requires_grad_() if t.grad_fn is not None else t, self.tensors
            )
            object.__setattr__(self, "tensors", leaves)

    @cached_property
    def sizes(self) -> Shapes:
        """Names and sizes of the batch's tensors."""
        return batch_shapes(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the storages of all tensors of the batch, each storage counted once."""
        return batch_bytes(self.tensors)

    @property
    def num_tokens(self) -> int:
        """Number of tokens: elements of the largest tensor of shape (samples, length), or 0 without such a tensor."""
        if not isinstance(self.tensors, Mapping):  # the entry of the profiler refuses such a batch in words
            return 0
        return max((prod(size) for _, size in self.sizes if len(size) == 2), default=0)


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Optimizer and batches of the training step to profile. `profile_model` describes the fields."""

    optimizer: torch.optim.Optimizer | None = None
    """Optimizer whose state and step are part of the profile. If None, the profile has no optimizer."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches in a step, 1 or more."""
    prefetched_batches: int = 0
    """Number of batches of later steps that are already on the model's device, 0 or more."""
    optimizer_step_bytes: int = 0
    """Temporary bytes of gradient clipping and the optimizer's step, 0 or more."""
    optimizer_state_bytes: int = 0
    """Bytes of state that the optimizer has yet to create, 0 or more."""

    def check(self) -> None:
        """Raise ValueError if a field is out of range."""
        for name, value in vars(self).items():
            minimum = 1 if name == "gradient_accumulation_steps" else 0
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if name != "optimizer" and (not is_int or value < minimum):
                raise ValueError(f"{name}={value!r} must be an int of at least {minimum}")

    def other_batches_bytes(self, batch_bytes: int) -> int:
        """Return the bytes of all batches on the device but the profiled one, if each takes `batch_bytes`."""
        return (self.gradient_accumulation_steps - 1 + self.prefetched_batches) * batch_bytes
