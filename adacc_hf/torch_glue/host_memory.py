"""Memory of the host next to a device: a check for separate memory, and the free bytes for this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from adacc_hf.torch_glue.distributed import num_ranks

UNIFIED_NAMES = ("GB10",)
"""Parts of the names of GPUs that share the host's memory, for drivers that do not report such GPUs as integrated."""
CGROUP = Path("/sys/fs/cgroup")
"""Folder with the limits of a container."""


def has_own_memory(device: torch.device) -> bool:
    """Return True if `device` is a GPU whose memory is separate from the host's. Payloads may then move to the host."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return not properties.is_integrated and not any(name in properties.name for name in UNIFIED_NAMES)


def free_host_bytes() -> int:
    """Return the free bytes of the host's memory, divided by the number of ranks on the host.

    If a container limits the memory, only the bytes that are free within this limit count. The number of ranks is the
    environment variable LOCAL_WORLD_SIZE, which torchrun and Accelerate set. If LOCAL_WORLD_SIZE is not set, all ranks
    of the run are assumed to be on this host.
    """
    import psutil

    free = min([psutil.virtual_memory().available, *_container_bytes()])
    return free // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks())))


def _container_bytes() -> list[int]:
    """Return a list with the bytes that are free within the memory limit of this process's container.

    The list is empty if the container has no limit, or if this process does not run in a container.

    The inactive part of the page cache counts as free, because the kernel frees it when memory is needed.
    """
    for folder, limit, used, cached in (
        (CGROUP, "memory.max", "memory.current", "inactive_file"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used_bytes = int((folder / used).read_text()) - int(counts.get(cached, 0))
            return [max(0, int((folder / limit).read_text()) - used_bytes)]
        except (OSError, ValueError):  # no such files, or "max", which means no limit
            continue
    return []
