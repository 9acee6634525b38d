"""Table of a device's memory, logged when memory ran out: live tensors and predicted bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.torch_glue.memory import allocated_bytes, optimizer_tensors
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.tensors import parts_with_memory

NUM_LARGEST = 10
"""Number of rows for the largest live tensors."""
OTHERS = "activations, temporaries and inputs"
OTHER = "activation, temporary or input"


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

    Call this while the out-of-memory error is being handled, because the error's traceback keeps the step's tensors
    alive. The call takes a second or two, because the garbage collector lists all objects.
    """
    device, seen = next(model.parameters()).device, set[int]()
    states = [] if optimizer is None else optimizer_tensors(optimizer)
    gradients = [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
    named = {
        "parameters and buffers": [*model.named_parameters(), *model.named_buffers()],
        "gradients": gradients,
        "optimizer state": [("optimizer state", tensor) for tensor in states],
        OTHERS: [(OTHER, tensor) for tensor in _python_tensors()],
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


def _python_tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors that Python code refers to. Types are compared without `isinstance`, which would run the code
    of proxy objects."""
    return (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


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
    """Return the plain tensors that hold the memory of `tensor`: several if it wraps others, as a quantized tensor
    does, and none if it has no memory."""
    try:
        parts = parts_with_memory(tensor)
        return [part for part in parts if part.untyped_storage().nbytes()]
    except (RuntimeError, NotImplementedError):  # must not replace the out-of-memory error
        return []
