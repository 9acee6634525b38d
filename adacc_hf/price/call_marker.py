"""Marks of a step's parts in a memory meter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adacc_hf.price.measurement import Measurement
from adacc_hf.run.blocks import Strategy
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import tree_leaves


class CallMarker:
    """Wrapper of a block's strategy that marks in a meter when forward begins and ends, and when backward starts.

    The mark "tail" separates the blocks' backward from that of modules before them. It belongs to the first call whose
    result requires a gradient: the markers of a model share `trained_calls`, which the first call (`is_first`) clears.
    `before_backward` is called before a mark of a backward.
    """

    def __init__(
        self,
        name: str,
        inner: Strategy,
        meter: MemoryMeter,
        measurement: Measurement,
        *,
        is_first: bool,
        trained_calls: set[str],
        before_backward: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.inner = inner
        self.meter = meter
        self.measurement = measurement
        self.is_first = is_first
        self.trained_calls = trained_calls
        self.before_backward = before_backward

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_first:
            self.trained_calls.clear()
        self.meter.mark(("enter", self.name))
        result = self.inner.run(block, fn, args, kwargs)
        self.meter.mark(("leave", self.name))
        if self._mark_gradient(result, ("backward", self.name)):
            if not self.trained_calls:  # blocks before this one are frozen, and modules between may be trained
                self._mark_gradient(args, ("tail", self.name))
            self.trained_calls.add(self.name)
        return result

    def _mark_gradient(self, tree: Any, label: tuple[str, str]) -> bool:
        """Mark `label` once the gradient of the first differentiable tensor in `tree` is complete. Return False without
        one."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.measurement.on_gradient(leaf, lambda: self._mark(label))
                return True
        return False

    def _mark(self, label: tuple[str, str]) -> None:
        if self.before_backward is not None:
            self.before_backward()
        self.meter.mark(label)
