"""How long a device takes for something, and how long the host takes to ask for it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch

from adacc_hf.torch_glue.private import sleep_on_gpu

TIMING_REPEATS = 5
"""Runs per price, after one to warm up; the median stands. Five bound the effect of one interruption."""

HEAD_START = 2
"""How many times as long as the launches of a run the GPU is kept busy before it: launches vary."""
CYCLES_PER_SECOND = 3e9
"""More than a GPU's clock makes, so that what is meant to be busy for a second is."""

BACKWARD_ON_HOST, BACKWARD_ON_DEVICE = 1.0, 2.0
"""A block's backward as parts of its forward: to launch it takes as long, and each product of forward has two there."""

Bottleneck = Literal["device_ms", "host_ms"]


class Timing(NamedTuple):
    """Milliseconds of one run."""

    device_ms: float
    """Until the device is done, from when it began."""
    host_ms: float
    """Until the host goes on. On the CPU the two are one."""


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds by `clock` of one call of `run`, with all it starts on `device` and nothing started before."""
    start = seconds_at(device, clock)
    run()
    return seconds_at(device, clock) - start


def seconds_at(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """The time by `clock` once `device` has done all that it was given."""
    wait_for(device)
    return clock()


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = TIMING_REPEATS) -> float:
    """Median time of `run` on `device`, in milliseconds."""
    return time_of(run, device, repeats).device_ms


def time_of(run: Callable[[], object], device: torch.device, repeats: int = TIMING_REPEATS) -> Timing:
    """Medians over `repeats` runs, after one to warm up.

    On a GPU with cold caches, as an operator of a training step meets tensors that were stored long before: run again
    on the same tensors it would find them in the cache, and seem to move them at twice the speed of memory.
    """
    run()
    is_gpu = device.type == "cuda"
    timings = on_cuda(run, device, repeats, before=cache_flush(device)) if is_gpu else _on_cpu(run, repeats)
    return Timing(*(statistics.median(times) for times in zip(*timings, strict=True)))


CACHES_READ = 2
"""How many times a cache's bytes are read to flush it: it need not replace what is oldest first."""


def cache_flush(device: torch.device) -> Callable[[], object]:
    """Return a function that leaves nothing of earlier tensors in a GPU's cache.

    By reading: lines that were written are written back when others take their place, and those of a flush that writes
    would be within the run that is timed.
    """
    return flush_by_reading(CACHES_READ * torch.cuda.get_device_properties(device).L2_cache_size, device)


def flush_by_reading(nbytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that reads `nbytes` of `device`'s memory."""
    return torch.zeros(max(1, nbytes // 4), device=device).sum


def bottleneck(timings: Iterable[Timing], block_host_ms: float | None = None) -> Bottleneck:
    """What a step waits for whose blocks run all this in forward: the device, or the host that launches it.

    block_host_ms: how long the host takes for the plain block's forward, which has modules, hooks and autograd's graph
    besides the launches; None counts the launches alone.
    """
    device_ms, host_ms = (sum(times) for times in zip(*timings, strict=True))
    host_ms = host_ms if block_host_ms is None else block_host_ms
    on_device, on_host = device_ms * (1.0 + BACKWARD_ON_DEVICE), host_ms * (1.0 + BACKWARD_ON_HOST)
    return "device_ms" if on_device >= on_host else "host_ms"


def _on_cpu(run: Callable[[], object], repeats: int) -> list[Timing]:
    """With one thread, what it computes: the turns of other programs are no part of a price."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    timings = []
    for _ in range(repeats):
        begin = clock()
        run()
        ms = (clock() - begin) * 1e3
        timings.append(Timing(ms, ms))
    return timings


def on_cuda(
    run: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object] | None = None
) -> list[Timing]:
    """Times of `run`, each after a call of `before`.

    The GPU is kept busy until the run is launched: a training step is launched ahead of the GPU, and has none of the
    gaps in which it would wait for each kernel of a run that meets it idle.
    """
    with torch.cuda.device(device):
        # By the shortest: a run that waits for the device waits for what keeps it busy too, each time for longer.
        busy_cycles, shortest_s, timings = 0, math.inf, []
        for _ in range(1 + repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if before is not None:
                before()
            torch.cuda.synchronize()
            sleep_on_gpu(busy_cycles)
            start.record()
            begin = time.perf_counter()
            run()
            host_s = time.perf_counter() - begin
            end.record()
            end.synchronize()
            timings.append(Timing(start.elapsed_time(end), host_s * 1e3))
            shortest_s = min(shortest_s, host_s)
            busy_cycles = int(HEAD_START * shortest_s * CYCLES_PER_SECOND)
    return timings[1:]  # the first told how long launches take
