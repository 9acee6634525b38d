"""Times of a function: milliseconds that the device takes, and that the host takes to launch the device's work."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from adacc_hf.torch_glue.private import sleep_on_gpu

TIMING_REPEATS = 5
"""Number of timed runs after one warm-up run. One interrupted run hardly changes their median."""

BUSY_FACTOR = 2
"""Time for which the GPU is kept busy before a timed run, as a multiple of the (varying) time to launch its kernels."""
CYCLES_PER_SECOND = 3e9
"""Upper bound on a GPU's clock rate, for busy loops of at least a given time."""

BACKWARD_ON_HOST, BACKWARD_ON_DEVICE = 1.0, 2.0
"""Time of a block's backward as a multiple of the forward's time. On the host, launches take equally long in forward
and backward. On the device, backward computes two matrix products for each one in forward."""

Bottleneck = Literal["device_ms", "host_ms"]


class Timing(NamedTuple):
    """Times of one run in milliseconds, on the device and on the host."""

    device_ms: float
    """Milliseconds from the start of the run on the device to its end."""
    host_ms: float
    """Milliseconds until the host can continue, which on the CPU is `device_ms`."""


def device_name(device: torch.device) -> str:
    """Return the device's name, with the number of threads for a CPU. Times depend on both."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_names()[0]}, {torch.get_num_threads()} threads"


def processor_names() -> list[str]:
    """Return the processor's name for each core of this machine, or only the architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names or [platform.machine()]


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds by `clock` of one call of `run`, with all work that it starts on `device`."""
    start = seconds_at(device, clock)
    run()
    return seconds_at(device, clock) - start


def seconds_at(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the reading of `clock`, in seconds, once `device` has finished all of its work."""
    wait_for(device)
    return clock()


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = TIMING_REPEATS) -> float:
    """Return the median time of `run` on `device`, in milliseconds."""
    return time_of(run, device, repeats).device_ms


def time_of(run: Callable[[], object], device: torch.device, repeats: int = TIMING_REPEATS) -> Timing:
    """Return the median times of `repeats` runs of `run`, after one warm-up run.

    On a GPU, each run starts with a cold cache, because a training step's operators read tensors that were stored long
    before.
    """
    run()
    is_gpu = device.type == "cuda"
    timings = time_on_cuda(run, device, repeats, prepare=cache_flush(device)) if is_gpu else _time_on_cpu(run, repeats)
    return Timing(*(statistics.median(times) for times in zip(*timings, strict=True)))


FLUSH_FACTOR = 2
"""Ratio of the bytes read to flush a cache to its size, above 1 because it need not evict its oldest lines first."""


def cache_flush(device: torch.device) -> Callable[[], object]:
    """Return a function that evicts earlier tensors from a GPU's cache, by reading: dirty lines would be written back
    within the timed run."""
    nbytes = FLUSH_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(max(1, nbytes // 4), device=device).sum


def bottleneck(timings: Iterable[Timing]) -> Bottleneck:
    """Return the resource that limits a step whose forward takes `timings`: the device, or the host."""
    device_ms, host_ms = (sum(times) for times in zip(*timings, strict=True))
    on_device, on_host = device_ms * (1.0 + BACKWARD_ON_DEVICE), host_ms * (1.0 + BACKWARD_ON_HOST)
    return "device_ms" if on_device >= on_host else "host_ms"


def _time_on_cpu(run: Callable[[], object], repeats: int) -> list[Timing]:
    """Time `run` on the CPU: with one thread by its CPU time, which excludes other programs."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    timings = []
    for _ in range(repeats):
        begin = clock()
        run()
        ms = (clock() - begin) * 1e3
        timings.append(Timing(ms, ms))
    return timings


def time_on_cuda(
    run: Callable[[], object], device: torch.device, repeats: int, prepare: Callable[[], object] | None = None
) -> list[Timing]:
    """Return the times of `repeats` runs of `run`, with `prepare` before each.

    The GPU is kept busy until all kernels of the run are launched, as in a training step. An idle GPU would wait for
    each launch, and the waiting time would count.
    """
    with torch.cuda.device(device):
        # Use the shortest launch: a run that waits for the device also waits for the busy loop, longer each time.
        busy_cycles, shortest_s, timings = 0, math.inf, []
        for _ in range(1 + repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if prepare is not None:
                prepare()
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
            busy_cycles = int(BUSY_FACTOR * shortest_s * CYCLES_PER_SECOND)
    return timings[1:]  # the first run only measured the time of the launches
