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
