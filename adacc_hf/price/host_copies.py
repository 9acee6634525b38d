"""Measurement of copies between a device and the pinned memory of its host."""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import nn

from adacc_hf.artifacts.budget_values import HOST_SHARE
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_pool import HostPool, host_pool
from adacc_hf.price.timing import median_ms
from adacc_hf.torch_glue.distributed import gather_from_all_ranks
from adacc_hf.torch_glue.memory import free_host_bytes, has_own_memory

log = logging.getLogger(__name__)

MEASURED_BYTES = 32 * 2**20
"""Size of the copies with which bandwidth is measured."""
SMALL_BYTES = 4 * 2**10
"""Size of the copies with which latency is measured."""


def free_bytes_for(model: nn.Module) -> int:
    """Return the bytes of host memory that are free for payloads of `model`, with this process's pool of pinned memory,
    but without what other models have reserved in the pool."""
    return max(0, free_host_bytes() + host_pool.nbytes - host_pool.reserved_for_others(model))


def common_host_limit(config: AdaccConfig, model: nn.Module) -> int:
    """Return the least of all ranks' limits in bytes on payloads in host memory. All ranks must call this."""
    if config.host_memory is None:
        return 0
    return min(gather_from_all_ranks(config.host_limit(free_bytes_for(model))))


def measure_host_link(device: torch.device, config: AdaccConfig, model: nn.Module) -> tuple[HostLink | None, int]:
    """Return (cost of copies to and from host memory, free bytes of host memory for payloads of `model`).

    Return (None, 0) if `config` stores nothing there, or if the device's memory is the host's. All ranks of a host
    measure at about the same time, because in training they copy at the same time too.
    """
    if config.host_memory is None or not has_own_memory(device):
        return None, 0
    free_bytes = free_bytes_for(model)
    limit, most = config.host_limit(free_bytes), int(HOST_SHARE * free_bytes)
    if limit == most and not isinstance(config.host_memory, float):
        log.warning(
            "Adacc: host_memory=%r is above %s, %.0f %% of the host's free memory divided by the ranks on the host: "
            "payloads take at most this much. Set a smaller host_memory to avoid this warning",
            config.host_memory,
            format_bytes(most),
            100 * HOST_SHARE,
        )
    return time_copies(device), free_bytes


def time_copies(device: torch.device) -> HostLink:
    """Time copies of two sizes between `device` and pinned memory of the host, in both directions."""
    pool = HostPool()
    pool.reserve(pool, MEASURED_BYTES)
    times = {}
    for nbytes in (SMALL_BYTES, MEASURED_BYTES):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        times[nbytes, "to host"] = median_ms(partial(pool.store, [tensor]), device)
        block = pool.store([tensor])
        assert block is not None  # the pool has room for one tensor
        times[nbytes, "to device"] = median_ms(partial(pool.load, block, device), device)
        del block
    pool.release(pool)
    return HostLink(
        to_host_bytes_per_ms=MEASURED_BYTES / times[MEASURED_BYTES, "to host"],
        to_device_bytes_per_ms=MEASURED_BYTES / times[MEASURED_BYTES, "to device"],
        copy_ms=max(times[SMALL_BYTES, "to host"], times[SMALL_BYTES, "to device"]),
    )
