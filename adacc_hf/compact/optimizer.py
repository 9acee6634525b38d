"""AdamW in the subspaces of compact layers (CompAct, algorithms 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from adacc_hf.compact.layer import CompactLayer, make_plain


class CompactAdamW(torch.optim.AdamW):
    """AdamW, whose step on a compact layer's `core` [m, r] is carried over to its weight [m, n].

    Moments are of the subspace, 2 m r numbers a layer, and stay as they are when every `update_proj_gap` steps another
    subspace is drawn. Weight decay is the weight's. Groups with a "scale" hold the cores of `layers`, in order, and
    count their "steps". The step is fused, which makes no temporaries, unless `fused`, `foreach`, `capturable` or
    `differentiable` say otherwise.
    """

    def __init__(
        self, params: Iterable[Any], layers: Sequence[CompactLayer], update_proj_gap: int = 50, **settings: Any
    ) -> None:
        self.layers = list(layers)
        self.update_proj_gap = update_proj_gap
        if not any(settings.get(other) for other in ("foreach", "capturable", "differentiable")):
            settings = {"fused": True} | settings
        super().__init__(params, **settings)
        # A fused step finds by itself that GradScaler's gradients are infinite, and does nothing. Weights of compact
        # layers would decay all the same, so that GradScaler is to leave such a step out, as it does with others.
        self._step_supports_amp_scaling = False
        # A hook, which a step on stand-ins that tells what state is to come leaves out.
        self.register_step_pre_hook(_check_cores)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of AdamW, and then of the weights of compact layers.

        Raises ValueError where layers have got other cores than those that the optimizer has.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [group for group in self.param_groups if "scale" in group]
        stepping = [
            (layer, group["scale"], group["lr"] * group["weight_decay"])
            for group, layer in self._grouped_layers()
            if layer.core.grad is not None
        ]
        decays = [group["weight_decay"] for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0  # a core is zero
            # On the host, where what is counted for each parameter may be on a device.
            group["steps"] = group.get("steps", 0) + 1
        for layer, _, _ in stepping:
            layer.hold()
        try:
            _BARE_STEP(self)
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay
        for layer, scale, decay in stepping:
            layer.weight.mul_(1.0 - decay)
            layer.take(scale)
        self._begin_periods()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was saved, in the subspace of that step."""
        super().load_state_dict(state_dict)
        self._begin_periods()

    def remove(self) -> None:
        """Make the layers plain again. Harmless when called again."""
        while self.layers:
            make_plain(self.layers.pop())

    def _begin_periods(self) -> None:
        """Draw the subspaces of the period that the next step belongs to."""
        for group, layer in self._grouped_layers():
            layer.group.period = group.get("steps", 0) // self.update_proj_gap

    def _grouped_layers(self) -> Iterator[tuple[dict[str, Any], CompactLayer]]:
        """Each layer with the group that has its core. None of a copy that steps on stand-ins."""
        by_core = {id(layer.core): layer for layer in self.layers}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in by_core:
                    yield group, by_core[id(parameter)]


def _check_cores(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raise ValueError for layers that would not train, because their cores are not the optimizer's."""
    known = {id(core) for group in optimizer.param_groups for core in group["params"]}
    missing = sum(id(layer.core) not in known for layer in optimizer.layers)
    if missing:
        raise ValueError(
            f"CompAct's optimizer does not have the cores of {missing} of {len(optimizer.layers)} layers any more, and "
            f"they would not train: fully_shard, or DeepSpeed, has put others in their places. Let Accelerate (or the "
            f"Trainer) prepare model and optimizer together, or train with DDP"
        )


def _bare(step: Any) -> Callable[..., Any]:
    """`step` without the hooks of an optimizer, which torch puts around that of every class in use."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


_BARE_STEP = _bare(torch.optim.AdamW.step)
