"""A micro-batch that runs out of memory: free, plan tighter, try once more."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.rectifier import Rectifier
from adacc_hf.artifacts.errors import as_sentence
from adacc_hf.solve.budget import Budget
from adacc_hf.torch_glue.private import version_of
from adacc_hf.torch_glue.states import RandomStates, gpus_in_use
from adacc_hf.torch_glue.tensors import has_gradient_hooks

log = logging.getLogger(__name__)


TIGHTER = 0.9
"""Share of its memory that a policy may have after it ran out of memory."""


def tighter_budget(rectifier: Rectifier) -> int | float:
    """A budget of the same form, a tenth below what the policy in force keeps to."""
    budget = Budget.resolve(rectifier.memory_budget, rectifier.profile, rectifier.config)
    if budget.of_peak:
        return int(TIGHTER * min(budget.nbytes, rectifier.policy.predicted_peak_bytes))
    stored = min(budget.nbytes, rectifier.policy.predicted_stored_bytes)
    return math.floor(1e6 * TIGHTER * stored / rectifier.profile.plain_stored_bytes) / 1e6


def advice(rectifier: Rectifier) -> str:
    """What to set so that a step under the policy of `rectifier` fits."""
    needed = rectifier.policy.predicted_peak_bytes
    return (
        f"Adacc planned a peak of {needed} bytes for memory_budget={rectifier.memory_budget!r}: set "
        f"memory_budget={int(needed * TIGHTER)} or less, or use a smaller batch or shorter sequences"
    )


class GradientsBefore:
    """The gradients of a model before a micro-batch; nothing is copied and nothing synchronises."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (parameter, parameter.grad, None if parameter.grad is None else version_of(parameter.grad))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def restore(self) -> str | None:
        """Take away what a broken backward left; returns why that cannot be done, or None."""
        for parameter, gradient, version in self._before:
            if gradient is not None and version_of(gradient) != version:
                return "earlier micro-batches' gradients are half changed"
            if has_gradient_hooks(parameter):
                return "hooks have used some of its gradients (DeepSpeed, an optimizer that steps inside backward)"
        for parameter, gradient, _ in self._before:
            parameter.grad = gradient
        return None


def run_with_retry(
    run: Callable[[], Any], model: nn.Module, tighten: Callable[[], str | None], advice: Callable[[], str]
) -> Any:
    """What `run` returns, tried once more if it runs out of memory, with the random numbers of the first try.

    `tighten` frees what it can and lowers what the next attempt needs; it returns why it cannot, or None. Raises
    torch.OutOfMemoryError with `advice` if the first attempt cannot be repeated or the second one fails too.
    """
    before = GradientsBefore(model)
    random_states = RandomStates(gpus_in_use())  # some 45 microseconds
    try:
        return run()
    except torch.OutOfMemoryError as error:
        message = str(error)
    # Outside the except clause: the error's traceback holds the frames whose tensors are to be freed.
    gc.collect()
    obstacle = before.restore() or tighten()
    if obstacle is not None:
        raise torch.OutOfMemoryError(f"{as_sentence(message)} {advice()}. The step was not tried again: {obstacle}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    random_states.restore()
    log.warning("Adacc: out of memory (%s); trying the step again under a tighter policy", message.splitlines()[0])
    try:
        return run()
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{as_sentence(error)} {advice()}. The step failed twice") from None
