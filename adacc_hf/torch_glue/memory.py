"""The memory that a step takes, its static memory, what is available on a device and the host, out-of-memory errors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from adacc_hf.torch_glue.distributed import gradients_of, num_ranks
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import BACKWARD_HOOKS, storage_key, tree_leaves
from adacc_hf.torch_glue.tensors import parts_with_memory, without_gradient_hooks

FRAGMENTATION_SHARE = 0.1
"""Share of a GPU's memory reserved for fragmentation in torch's caching allocator, unless its segments are expandable.

tests/emulated_cuda/fragments.py fills an emulated GPU, on which `AdaccConfig.memory_margin` alone is not enough. The
share has not been measured on a GPU yet.
"""
FRAGMENTATION_HINT = (
    f'memory_budget="auto" reserves {FRAGMENTATION_SHARE:.0%} of the GPU for memory fragmentation; set '
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before training to use this memory too"
)

HEAP_SHARE = 0.25
"""Share of a CPU's free memory reserved for what the C library's heap keeps besides the live storages: 19 to 29 % of
the memory that training added in measured runs (GPT-2 with peaks of 0.35 to 1.3 GiB, glibc 2.36)."""

_FAILED_ALLOCATION_MESSAGES = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "HIP out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Messages of failed allocations that are plain RuntimeErrors, and not torch.OutOfMemoryError. They come from torch's
CPU allocator, and from libraries that allocate memory themselves (cuBLAS, cuDNN, Triton, the kernel loader)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` says that the device or the machine ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FAILED_ALLOCATION_MESSAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memory of one forward and backward, in bytes of live storages."""

    static_bytes: int
    """Bytes live before the step: parameters, buffers, gradients, optimizer state, the batch (see `static_bytes`)."""
    stored_bytes: int
    """Bytes that forward stores for backward, without the loss itself."""
    peak_bytes: int
    """Peak of the live bytes during the step, static memory included."""


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection, which frees tensors in reference cycles at random times, inside the `with` block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def measure_step(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> StepMemory:
    """Run one forward and backward of `model` on `batch`, and return the memory of that step.

    Existing gradients are restored afterwards, the new gradients are dropped, and gradient hooks are not called. Random
    generators advance as in a step.
    """
    device = next(model.parameters()).device
    allocate_workspaces(device)
    live_bytes = static_bytes(model, batch, optimizer)
    gradients = [(p, p.grad) for p in model.parameters()]
    copies = [(gradient, gradient.clone()) for _, gradient in gradients if gradient is not None]
    meter = MemoryMeter.for_device(device)
    module_hooks = [hooks for module in model.modules() for kind in BACKWARD_HOOKS if (hooks := vars(module)[kind])]
    with without_gradient_hooks(model.parameters(), module_hooks), garbage_collection_disabled(), meter:
        loss = forward_loss(model, batch)
        meter.mark(("backward",))
        backward(loss)
    loss_bytes = loss.untyped_storage().nbytes()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    for original, values in copies:
        original.copy_(values)
    backward_start = next(point for point in meter.points if point.label == ("backward",))
    return StepMemory(
        static_bytes=live_bytes,
        stored_bytes=backward_start.live_bytes - loss_bytes,
        peak_bytes=live_bytes + meter.peak_bytes,
    )


def forward_loss(model: Callable[..., Any], batch: Mapping[str, Any]) -> torch.Tensor:
    """Run one forward of `model` on `batch`, clear autocast's cache, and return the loss. Raise ValueError if the model
    returns no loss that requires a gradient."""
    loss = getattr(model(**batch), "loss", None)
    torch.clear_autocast_cache()
    is_frozen = isinstance(model, nn.Module) and not any(parameter.requires_grad for parameter in model.parameters())
    if isinstance(loss, torch.Tensor) and not loss.requires_grad and is_frozen:
        raise ValueError(
            "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_(True) "
            "on the parameters to train"
        )
    if loss is None or not loss.requires_grad:
        raise ValueError(
            "the model returns no loss for this batch: add the labels to the batch, or, if the model does not compute "
            "its loss, pass a function compute_loss(model, batch) that does, as compute_loss=... of profile_model or "
            "AdaccSession"
        )
    return loss


def backward(loss: torch.Tensor) -> None:
    """Run backward from `loss`, with autocast disabled, as training does."""
    # Disable autocast only if it is enabled: casts that a checkpoint makes in backward are freed when the outermost
    # autocast context ends, and a context entered here would keep them alive.
    is_under_autocast = torch.is_autocast_enabled(loss.device.type)
    with torch.autocast(loss.device.type, enabled=False) if is_under_autocast else nullcontext():
        loss.backward()


def static_bytes(model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes live on the model's device before a step: on a GPU those that the allocator counts for this
    process, on a CPU, whose allocator does not count, those of model, batch and optimizer (`count_static_bytes`)."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles, such as an earlier model's, are live now but not during the step
    return max(count_static_bytes(model, batch, optimizer), allocated_bytes(device))


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that this process has allocated on `device`, or 0 for a CPU, where torch does not count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def has_expandable_segments() -> bool:
    """Return True if the GPU allocator avoids fragmentation: with expandable segments, or with cudaMallocAsync."""
    if torch.cuda.get_allocator_backend() != "native":  # cudaMallocAsync maps scattered pages into one block
        return True
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def allocate_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces, which would otherwise count as stored in the first step."""
    if device.type == "cuda":
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            factor = torch.ones(16, 16, device=device, requires_grad=True)
            (factor @ factor).sum().backward()


def count_static_bytes(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Return the bytes of the distinct storages of parameters, buffers, gradients, optimizer state and batch that are
    on the model's device (AdamW's step counts and an offloaded state are not)."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers(), *gradients_of(model)]
    tensors += [leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor)]
    if optimizer is not None:
        tensors += optimizer_tensors(optimizer)
    device = next(model.parameters()).device
    return distinct_bytes(tensor for tensor in tensors if tensor.device == device)


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors that `optimizer`, or a set of optimizers, holds in addition to the model's parameters: in its
    state or objects there (GaLore's projections), in the parameter groups (GrokAdamW), or in attributes (AdaLomo)."""
    # DeepSpeed's optimizer has `state`, but is not a torch optimizer.
    tensors = tensors_in([*getattr(optimizer, "state", {}).values()])
    for member in component_optimizers(optimizer):
        groups = [value for group in member.param_groups for name, value in group.items() if name != "params"]
        attributes = [value for name, value in vars(member).items() if name not in ("state", "param_groups")]
        tensors += tensors_in([*member.state.values(), *groups])
        tensors += [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, torch.Tensor)]
    return tensors


def component_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of which `optimizer`, or a set (GaLore), consists, without Accelerate's."""
    if isinstance(optimizer, WeakSet):
        return [member for each in optimizer for member in component_optimizers(each)]
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    layers = getattr(optimizer, "optimizer_dict", None)
    return list(layers.values()) if isinstance(layers, dict) and layers else [optimizer]


def tensors_in(containers: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, and the tensors that are attributes of objects in these containers."""
    leaves = tree_leaves(containers)
    records = [leaf for leaf in leaves if hasattr(leaf, "__dict__") and not callable(leaf)]
    leaves += [leaf for record in records if not isinstance(record, torch.Tensor) for leaf in tree_leaves(vars(record))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def batch_bytes(batch: Mapping[str, Any]) -> int:
    """Return the bytes of the distinct storages of a batch's tensors."""
    return distinct_bytes(leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor))


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of `tensors` on this rank, each storage counted once."""
    storages = [part.untyped_storage() for tensor in tensors for part in parts_with_memory(tensor)]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def available_bytes(device: torch.device, static_bytes: int) -> int:
    """Return the bytes that this process uses or can still use on `device`.

    `static_bytes` are the bytes that the process uses already on a CPU. `FRAGMENTATION_SHARE` or `HEAP_SHARE` is
    subtracted.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        available = min(free + torch.cuda.memory_reserved(device), limit)
        return available if has_expandable_segments() else int(available * (1 - FRAGMENTATION_SHARE))
    return static_bytes + int(free_host_bytes() * (1 - HEAP_SHARE))


# Memory of the host.

UNIFIED_NAMES = ("GB10",)  # GPUs that share the host's memory, and that not all drivers report as integrated
CGROUP = Path("/sys/fs/cgroup")  # cgroups limit the memory of containers and of jobs
OWN_CGROUPS = Path("/proc/self/cgroup")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Names of the files with a cgroup's limit and its used bytes, and the key of the inactive page cache in memory.stat,
for each version of cgroups."""


def has_own_memory(device: torch.device) -> bool:
    """Return True if `device` is a GPU whose memory is separate from the host's, so that moving tensors to the host
    frees memory."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return not properties.is_integrated and not any(name in properties.name for name in UNIFIED_NAMES)


def free_host_bytes() -> int:
    """Return the free bytes of the host's memory and of the process's cgroups, divided by the number of ranks on the
    host: LOCAL_WORLD_SIZE, which torchrun and Accelerate set, or all ranks of the run."""
    import psutil

    free = min([psutil.virtual_memory().available, *(limit - used for limit, used in _container_bytes())])
    return max(0, free) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks())))


def total_host_bytes() -> int:
    """Return the bytes of the host's memory that this process's cgroups allow."""
    import psutil

    return min([psutil.virtual_memory().total, *(limit for limit, _ in _container_bytes())])


def _container_bytes() -> list[tuple[int, int]]:
    """Return (limit, used bytes) of each memory limit on this process's cgroup and on the cgroups that contain it, set
    by containers, batch systems or systemd. The inactive page cache counts as free: the kernel frees it when needed."""
    own_paths: dict[str, str] = {}  # by controller; "" stands for version 2, which has all controllers in one hierarchy
    with suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():  # "number:controllers:path"
            _, controllers, path = line.split(":", 2)
            own_paths |= dict.fromkeys(controllers.split(","), path)
    return [
        limit
        for hierarchy, controller, names in ((CGROUP, "", VERSION_2), (CGROUP / "memory", "memory", VERSION_1))
        for folder in _folders(hierarchy, own_paths.get(controller, "/"))
        for limit in _limit_of(folder, *names)
    ]


def _folders(hierarchy: Path, path: str) -> list[Path]:
    """Return the folder of the cgroup `path` and all folders above it in `hierarchy`. Some may not exist: within a
    container, `path` may be relative to the machine's hierarchy, of which only a part is mounted."""
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    return [hierarchy.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _limit_of(folder: Path, limit: str, used: str, cached: str) -> list[tuple[int, int]]:
    """Return a list with (limit, used bytes) of the cgroup in `folder`, or an empty list if it has no limit."""
    try:
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used_bytes = int((folder / used).read_text()) - int(counts.get(cached, 0))
        return [(int((folder / limit).read_text()), used_bytes)]
    except (OSError, ValueError):  # no such files, or "max", which means no limit
        return []
