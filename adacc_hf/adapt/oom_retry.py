"""Retry of a micro-batch that ran out of memory, and the table of the device's memory for the log: live tensors and
predicted bytes."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.errors import as_sentence
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.torch_glue.memory import allocated_bytes, is_out_of_memory, optimizer_tensors
from adacc_hf.torch_glue.private import storage_key, version_of
from adacc_hf.torch_glue.rng_state import RandomStates, gpus_in_use
from adacc_hf.torch_glue.tensors import has_gradient_hooks, parts_with_memory

log = logging.getLogger(__name__)

TIGHTER = 0.9
"""Budget after a step ran out of memory, as a fraction of the bytes that its policy was predicted to need."""
NUM_LARGEST = 10
"""Number of rows for the largest live tensors."""
OTHERS = "activations, temporaries and inputs"
OTHER = "activation, temporary or input"


def tighter_budget(policy: Policy, profile: Profile, budget: Budget) -> int | float:
    """Return a budget 10 % below the current one, or below the need of `policy` if less: bytes (int) if the budget
    limits the peak, else a fraction of plain training's stored bytes (float)."""
    if budget.limits_peak:
        return int(TIGHTER * min(budget.nbytes, policy.predicted_peak_bytes))
    stored = min(budget.nbytes, policy.predicted_stored_bytes)
    return math.floor(1e6 * TIGHTER * stored / profile.plain_stored_bytes) / 1e6


class SavedGradients:
    """References to a model's gradients before a micro-batch, for restoring them without a copy or synchronization."""

    def __init__(self, model: nn.Module) -> None:
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else version_of(parameter.grad))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def restore(self) -> str | None:
        """Restore the gradients after a failed backward. Return None, or the reason why this is impossible."""
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

    Before, `tighten` applies a policy that needs less memory. It returns None, or the reason why there is none. If the
    first attempt cannot be repeated, or the second one fails too, raise torch.OutOfMemoryError with `advice`, and log
    `report`, which is called while the attempt's tensors are alive.
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


class LiveTensor(NamedTuple):
    """Row of the table: one live storage, with the name and shape of the first tensor found in this storage."""

    nbytes: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{format_bytes(self.nbytes):>12}  {self.dtype} {shape}  {self.name}"


def memory_table(model: nn.Module, optimizer: Any, policy: Policy | None, profile: Profile | None) -> str:
    """Return a text table of the live memory of the device of `model` by purpose, each storage counted once, and of the
    memory planned by `policy` for `profile`, which are None if the step had no policy.

    Call this in a second or two, while the out-of-memory error is handled, whose traceback keeps the tensors alive.
    """
    device, seen = next(model.parameters()).device, set[int]()
    states = [] if optimizer is None else optimizer_tensors(optimizer)
    gradients = [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
    named = {
        "parameters and buffers": [*model.named_parameters(), *model.named_buffers()],
        "gradients": gradients,
        "optimizer state": [("optimizer state", tensor) for tensor in states],
        # `isinstance` would run the code of proxy objects.
        OTHERS: [(OTHER, item) for item in gc.get_objects() if issubclass(type(item), torch.Tensor)],
    }
    tensors = {purpose: list(_new_storages(group, device, seen)) for purpose, group in named.items()}
    live = {purpose: sum(tensor.nbytes for tensor in group) for purpose, group in tensors.items()}
    allocated = allocated_bytes(device)
    # On a CPU, whose allocator has no statistics, only tensors that Python code refers to are counted.
    live[OTHERS] = max(live[OTHERS], allocated - sum(live.values()) + live[OTHERS])
    rows = [*live.items(), ("live in all", sum(live.values()))]
    if device.type == "cuda":
        rows.append(("reserved by torch, not in use", torch.cuda.memory_reserved(device) - allocated))
    if host_pool.nbytes:
        rows += [("payloads in host memory", host_pool.live_bytes), ("pool of host memory", host_pool.nbytes)]
    if policy is not None:
        rows.append(("planned: peak", policy.predicted_peak_bytes))
        rows += [] if profile is None else [("planned: live before the step", profile.static_bytes)]
        rows.append(("planned: stored activations of blocks", policy.predicted_stored_bytes))
        if policy.predicted_host_bytes:
            rows.append(("planned: payloads in host memory", policy.predicted_host_bytes))
    largest = sorted((tensor for group in tensors.values() for tensor in group), key=lambda t: t.nbytes, reverse=True)
    lines = [f"Adacc: memory of {device} when it ran out:"]
    lines += [f"  {name:<40}{format_bytes(nbytes):>12}" for name, nbytes in rows]
    return "\n".join([*lines, "Largest live tensors:", *map(str, largest[:NUM_LARGEST])])


def _new_storages(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device, seen: set[int]
) -> Iterator[LiveTensor]:
    for name, tensor in tensors:
        for part in _parts_for_table(tensor):
            storage = part.untyped_storage()
            key = storage_key(storage)
            if storage.device == device and key not in seen and storage.nbytes():
                seen.add(key)
                yield LiveTensor(storage.nbytes(), name, str(part.dtype).removeprefix("torch."), tuple(part.shape))


def _parts_for_table(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the memory of `tensor`: several, or none, if it wraps others."""
    try:
        parts = parts_with_memory(tensor)
        return [part for part in parts if part.untyped_storage().nbytes()]
    except (RuntimeError, NotImplementedError):  # must not replace the out-of-memory error
        return []
