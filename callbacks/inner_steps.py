"""Whether an optimizer steps inside the Trainer's `training_step`, where no callback sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


class InnerSteps(AbstractContextManager["InnerSteps"]):
    """Notes whether any of torch's optimizers steps while it is open: under DeepSpeed, or layer by layer."""

    def __init__(self) -> None:
        self.were_seen = False
        self._hook: Any = None

    def __enter__(self) -> InnerSteps:
        self._hook = register_optimizer_step_pre_hook(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _see(self, *_: Any) -> None:
        self.were_seen = True
