"""Table of a device's memory, logged when memory ran out: live tensors, predicted bytes, and sizes that would fit."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.solve.simple_policies import checkpoint_policy
from adacc_hf.torch_glue.memory import allocated_bytes, optimizer_tensors
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.tensors import parts_with_memory

NUM_LARGEST = 10
"""Number of rows of the out-of-memory table for the largest live tensors, and also for the largest activations that the
policy stores."""
MAX_GROWTH = 16
"""Size of the largest batch for which a peak is predicted, as a multiple of the profiled batch's size."""
OTHER = "activation, temporary or input"


@dataclass(frozen=True)
class LiveTensor:
    """Row of the table: one live storage, with the name and shape of the first tensor found in this storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{format_bytes(self.nbytes):>12}  {self.dtype} {shape}  {self.name}"


@dataclass(frozen=True, kw_only=True)
class LiveMemory:
    """Live bytes of one device when memory ran out, by purpose. Each storage is counted once."""

    device: torch.device
    parameter_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    optimizer_bytes: int
    other_bytes: int
    """All other live bytes. On a CPU, whose allocator has no statistics, only tensors that Python code refers to are
    counted."""
    unused_bytes: int | None
    """Bytes that torch's allocator has reserved and that no tensor uses, or None on a CPU."""
    largest: tuple[LiveTensor, ...]
    host_bytes: int = 0
    """Bytes in the pool of host memory that payloads use."""
    host_pool_bytes: int = 0
    """Size in bytes of the pool of host memory."""

    @classmethod
    def measure(cls, model: nn.Module, optimizer: Any) -> LiveMemory:
        """Measure the live memory of the device of `model`.

        Call this while the out-of-memory error is being handled, because the error's traceback keeps the step's tensors
        alive. The call takes a second or two, because the garbage collector lists all objects.
        """
        device = next(model.parameters()).device
        parameters = [*model.named_parameters(), *model.named_buffers()]
        gradients = [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
        states = [] if optimizer is None else [("optimizer state", tensor) for tensor in optimizer_tensors(optimizer)]
        seen: set[int] = set()
        groups = [
            list(_new_storages(tensors, device, seen))
            for tensors in (parameters, gradients, states, ((OTHER, tensor) for tensor in _python_tensors()))
        ]
        parameter_bytes, gradient_bytes, optimizer_bytes, other_bytes = (
            sum(tensor.nbytes for tensor in group) for group in groups
        )
        allocated = allocated_bytes(device)
        return cls(
            device=device,
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            other_bytes=max(other_bytes, allocated - parameter_bytes - gradient_bytes - optimizer_bytes),
            unused_bytes=torch.cuda.memory_reserved(device) - allocated if device.type == "cuda" else None,
            host_bytes=host_pool.live_bytes,
            host_pool_bytes=host_pool.nbytes,
            largest=tuple(sorted((t for g in groups for t in g), key=lambda t: t.nbytes, reverse=True)[:NUM_LARGEST]),
        )

    @property
    def live_bytes(self) -> int:
        """Total live bytes: parameters and buffers, gradients, optimizer state, and others."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.other_bytes


def memory_table(live: LiveMemory, policy: Policy | None, profile: Profile | None) -> str:
    """Return a text table of a device's memory, for the log. `policy` and `profile` belong to the failed step, or are
    None if the step had no policy."""
    rows = [
        ("parameters and buffers", live.parameter_bytes),
        ("gradients", live.gradient_bytes),
        ("optimizer state", live.optimizer_bytes),
        ("activations, temporaries and inputs", live.other_bytes),
        ("live in all", live.live_bytes),
    ]
    if live.unused_bytes is not None:
        rows.append(("reserved by torch, not in use", live.unused_bytes))
    if live.host_pool_bytes:
        rows += [("payloads in host memory", live.host_bytes), ("pool of host memory", live.host_pool_bytes)]
    if policy is not None:
        rows += _policy_rows(policy, profile)
    lines = [f"Adacc: memory of {live.device} when it ran out:"]
    lines += [f"  {name:<40}{format_bytes(nbytes):>12}" for name, nbytes in rows]
    lines += ["Largest live tensors:", *(f"{tensor}" for tensor in live.largest)]
    if policy is not None and profile is not None:
        stored = _stored_activations(policy, profile)
        if stored:
            lines += ["Largest activations that the plan stores, summed over blocks of one kind:", *stored]
        lines += filter(None, [_what_would_fit(min(live.live_bytes, policy.predicted_peak_bytes), profile)])
    return "\n".join(lines)


def _policy_rows(policy: Policy, profile: Profile | None) -> list[tuple[str, int]]:
    rows = [
        ("planned: peak", policy.predicted_peak_bytes),
        ("planned: stored activations of blocks", policy.predicted_stored_bytes),
    ]
    if profile is not None:
        rows.insert(1, ("planned: live before the step", profile.static_bytes))
    if policy.predicted_host_bytes:
        rows.append(("planned: payloads in host memory", policy.predicted_host_bytes))
    return rows


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
                yield LiveTensor(name, tuple(part.shape), str(part.dtype).removeprefix("torch."), storage.nbytes())


def _parts_for_table(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the memory of `tensor`: several if it wraps others, as a quantized tensor
    does, and none if it has no memory."""
    try:
        parts = parts_with_memory(tensor)
        return [part for part in parts if part.untyped_storage().nbytes()]
    except (RuntimeError, NotImplementedError):  # must not replace the out-of-memory error
        return []


def _stored_activations(policy: Policy, profile: Profile) -> list[str]:
    """Return lines on the largest activations that `policy` stores. Blocks that share a plan are summed up in one
    line."""
    blocks: dict[tuple[int, int], list[str]] = {}
    plans = dict(policy.blocks)
    for block in profile.blocks:
        if block.name in plans:
            number = profile.kind_index(block, policy.plan_of(block.name))
            blocks.setdefault((number, plans[block.name]), []).append(block.name)
    rows = []
    for (number, plan_number), names in blocks.items():
        kind, plan = profile.kinds[number], policy.plans[plan_number]
        if plan.kind != kind.digest or plan.is_checkpointed:
            continue
        for value in kind.activations:
            choice = plan.choice(value.index)
            if choice.action is Action.RETAIN:
                nbytes = value.nbytes
            elif choice.action is Action.COMPRESS:
                nbytes = kind.codec_option(value.index, choice).nbytes
            else:
                continue
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            rows.append((nbytes * len(names), f"{choice}  {kind.names[value.index]} of {names[0]}{others}"))
    rows.sort(key=lambda row: row[0], reverse=True)
    return [f"{format_bytes(nbytes):>12}  {text}" for nbytes, text in rows[:NUM_LARGEST] if nbytes]


def _what_would_fit(limit: int, profile: Profile) -> str | None:
    """Return a line of text on the largest batches that fit into `limit` bytes, or None if `profile` predicts no other
    sizes."""
    sizes = profile.sizes
    if sizes is None:
        return None
    shapes = profile.measured[0][0]
    _, first_size = shapes[0]

    def fits(other: Shapes) -> bool:
        if sizes.size_class(other) is None:
            return False
        return checkpoint_policy(sizes.profile_at(profile, other)).predicted_peak_bytes <= limit

    def largest(dim: int) -> int:
        bound = MAX_GROWTH * first_size[dim] + 1
        return bisect_left(
            range(1, bound), True, key=lambda n: not fits(_resized_batch(shapes, dim, first_size[dim], n))
        )

    samples = largest(0)
    tokens = largest(1) if len(first_size) > 1 else 0
    found = [f"{samples} samples of this length"] if samples else []
    found += [f"{first_size[0]} samples of length {tokens}"] if tokens else []
    if not found:
        return f"Predicted to fit into {format_bytes(limit)} with every block recomputed: not even one sample"
    return f"Predicted to fit into {format_bytes(limit)} with every block recomputed: {' or '.join(found)}"


def _resized_batch(shapes: Shapes, dim: int, before: int, after: int) -> Shapes:
    """Return `shapes`, the shapes of a batch, with each size `before` replaced by `after`, for the out-of-memory table.

    If `dim` is 0, only the first dimension (samples) is changed, else only the later dimensions (sequence length).
    """

    def change(place: int, n: int) -> int:
        return after if n == before and (place == 0) == (dim == 0) else n

    return tuple((name, tuple(change(place, n) for place, n in enumerate(size))) for name, size in shapes)
