"""Host memory: free bytes of the host, and a test whether a device has memory that is separate from the host's."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from adacc_hf.torch_glue.distributed import num_ranks

UNIFIED_NAMES = ("GB10",)  # GPUs that share the host's memory, and that not all drivers report as integrated
CGROUP = Path("/sys/fs/cgroup")  # cgroups limit the memory of containers and of jobs
OWN_CGROUPS = Path("/proc/self/cgroup")


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
    """Return (limit, used bytes) of each memory limit on this process's cgroup (version 2) and on the cgroups that
    contain it, set by containers, batch systems or systemd. The inactive page cache counts as free: the kernel frees it
    when needed."""
    path = ""  # of this process's cgroup, in a line "0::path"
    with suppress(OSError):
        lines = OWN_CGROUPS.read_text().splitlines()
        path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
    limits = []
    # Some folders may not exist: within a container, the path may be relative to the machine's hierarchy, of which only
    # a part is mounted.
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    for depth in range(len(parts) + 1):
        folder = CGROUP.joinpath(*parts[:depth])
        with suppress(OSError, ValueError):  # no such files, or "max", which means no limit
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used_bytes = int((folder / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
            limits.append((int((folder / "memory.max").read_text()), used_bytes))
    return limits
