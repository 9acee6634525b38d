"""Retry of a micro-batch that ran out of memory, under a tighter budget."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import as_sentence
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.torch_glue.memory import is_out_of_memory
from adacc_hf.torch_glue.private import version_of
from adacc_hf.torch_glue.rng_state import RandomStates, gpus_in_use
from adacc_hf.torch_glue.tensors import has_gradient_hooks

log = logging.getLogger(__name__)

TIGHTER = 0.9
"""Budget after a step ran out of memory, as a fraction of the bytes that its policy was predicted to need."""


def tighter_budget(policy: Policy, profile: Profile, budget: Budget) -> int | float:
    """Return a budget that is 10 % below the current budget or the predicted need of the current policy, whichever is
    smaller.

    If the budget is a limit on peak memory, the result is a number of bytes (int). Otherwise the result is a fraction
    of the bytes that plain training stores (float).
    """
    if budget.limits_peak:
        return int(TIGHTER * min(budget.nbytes, policy.predicted_peak_bytes))
    stored = min(budget.nbytes, policy.predicted_stored_bytes)
    return math.floor(1e6 * TIGHTER * stored / profile.plain_stored_bytes) / 1e6


def advice(policy: Policy, memory_budget: str | float | int) -> str:
    """Return a sentence for the error message after memory ran out: which settings would make a step fit in memory."""
    needed = policy.predicted_peak_bytes
    return (
        f"Adacc planned a peak of {needed} bytes for memory_budget={memory_budget!r}: set "
        f"memory_budget={int(needed * TIGHTER)} or less, or use a smaller batch or shorter sequences"
    )


class SavedGradients:
    """References to a model's gradients before a micro-batch, for restoring them without a copy or synchronization."""

    def __init__(self, model: nn.Module) -> None:
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else version_of(parameter.grad))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def restore(self) -> str | None:
        """Restore the gradients after a failed backward.

        Return None, or the reason why the gradients cannot be restored.
        """
        for parameter, gradient, version in self._gradients:
            if gradient is not None and version_of(gradient) != version:
                return "the failed backward has changed gradients of earlier micro-batches in place"
            if has_gradient_hooks(parameter):
                return "hooks have used gradients of the failed backward (DeepSpeed, an optimizer step inside backward)"
        for parameter, gradient, _ in self._gradients:
            parameter.grad = gradient
        return None


def run_with_retry(
    run: Callable[[], Any],
    model: nn.Module,
    tighten: Callable[[], str | None],
    advice: Callable[[], str],
    report: Callable[[], str],
    retries: bool = True,
) -> Any:
    """Call `run` and return its result. If memory runs out, and `retries`, call it again with equal random numbers.

    Before the second attempt, `tighten` is called to apply a policy that needs less memory. `tighten` returns None, or
    the reason why there is no such policy. Raises torch.OutOfMemoryError, whose message includes the result of
    `advice`, if the first attempt cannot be repeated, or if the second attempt runs out of memory too. In both cases
    the text returned by `report`, which describes the memory of the failed attempt, is logged. `report` is called while
    the tensors of this attempt are alive.
    """
    if not retries:
        with memory_reported(report):
            return run()
    gradients = SavedGradients(model)
    random_states = RandomStates(gpus_in_use())  # takes about 45 microseconds
    try:
        return run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message, memory = str(error), report()
    # Outside the except clause, because the error's traceback keeps frames alive, and the frames keep the tensors to be
    # freed.
    gc.collect()
    obstacle = gradients.restore() or tighten()
    if obstacle is not None:
        log.error("%s", memory)
        raise torch.OutOfMemoryError(f"{as_sentence(message)} {advice()}. The step was not tried again: {obstacle}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    random_states.restore()
    log.warning("Adacc: out of memory (%s); trying the step again under a tighter policy", message.splitlines()[0])
    try:
        return run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.error("%s", report())
        raise torch.OutOfMemoryError(f"{as_sentence(error)} {advice()}. The step failed twice") from None


@contextmanager
def memory_reported(report: Callable[[], str]) -> Iterator[None]:
    """If memory runs out inside the `with` block, log the text returned by `report`, and raise the error again."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            log.error("%s", report())
        raise
