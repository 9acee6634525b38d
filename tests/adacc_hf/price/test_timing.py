from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adacc_hf.price.timing import (
    FLUSH_FACTOR,
    Timing,
    bottleneck,
    cache_flush,
    median_ms,
    time_of,
    time_on_cuda,
    wait_for,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def counted_times():
    """Keep measured times."""


@pytest.mark.parametrize(("threads", "clock_name"), [(1, "thread_time"), (2, "perf_counter")])
def test_the_median_ignores_one_interruption(monkeypatch, threads, clock_name):
    clock = iter([0.0, 0.002, 1.0, 1.002, 2.0, 3.0, 4.0, 4.003, 5.0, 5.002])
    monkeypatch.setattr(f"adacc_hf.price.timing.time.{clock_name}", lambda: next(clock))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    runs = []
    assert median_ms(lambda: runs.append(1), CPU) == pytest.approx(2.0)
    assert len(runs) == 6


class Gpu:
    """A simulated GPU that works through the host's launches, both on one clock of seconds."""

    HERTZ = 2e9

    def __init__(self) -> None:
        self.now = self.free_at = 0.0

    def launch(self, host_s: float, device_s: float) -> None:
        self.now += host_s
        self.free_at = max(self.now, self.free_at) + device_s

    def synchronize(self, *_: object) -> None:
        self.now = max(self.now, self.free_at)

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.reached_at = max(gpu.now, gpu.free_at)

            def synchronize(self) -> None:
                gpu.synchronize()

            def elapsed_time(self, end: Event) -> float:
                return (end.reached_at - self.reached_at) * 1e3

        monkeypatch.setattr("adacc_hf.price.timing.time.perf_counter", lambda: gpu.now)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr("adacc_hf.price.timing.cache_flush", lambda device: lambda: self.launch(1e-6, 20e-6))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(1e-6, cycles / self.HERTZ))


@pytest.mark.parametrize(("host_s", "device_s"), [(10e-6, 2e-6), (10e-6, 50e-6)], ids=["short", "long"])
def test_a_gpu_is_not_timed_while_it_waits_for_launches(monkeypatch, host_s, device_s):
    gpu = Gpu()
    gpu.put_in_place(monkeypatch)

    def run() -> None:
        for _ in range(3):
            gpu.launch(host_s, device_s)

    timing = time_of(run, torch.device("cuda", 0))
    assert timing.device_ms == pytest.approx(3 * device_s * 1e3)
    assert timing.host_ms == pytest.approx(3 * host_s * 1e3)


def test_a_run_that_waits_for_the_gpu_does_not_wait_longer_each_time(monkeypatch):
    """Repeated runs that wait for the GPU do not take longer each time: the wait has the work that delays it."""
    gpu = Gpu()
    gpu.put_in_place(monkeypatch)

    def run() -> None:
        gpu.launch(10e-6, 50e-6)
        gpu.synchronize()

    timings = time_on_cuda(run, torch.device("cuda", 0), 20)
    assert max(timing.host_ms for timing in timings) < 1.0  # times 3 each run: 200 s
    assert timings[-1].device_ms == pytest.approx(50e-3)


def test_repeats_on_a_gpu_find_nothing_in_its_cache(monkeypatch):
    gpu = Gpu()
    gpu.put_in_place(monkeypatch)
    is_cold, times = [False], []

    def flush() -> None:
        is_cold[0] = True
        gpu.launch(1e-6, 20e-6)

    def run() -> None:
        times.append(60e-6 if is_cold[0] else 25e-6)
        gpu.launch(5e-6, times[-1])
        is_cold[0] = False

    monkeypatch.setattr("adacc_hf.price.timing.cache_flush", lambda device: flush)
    assert time_of(run, torch.device("cuda", 0)).device_ms == pytest.approx(60e-3)


def test_a_cache_is_flushed_by_reading_more_than_it_holds(monkeypatch):
    cache_bytes, read = 3 * 2**20, []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert not func._schema.is_mutable
            read.append(sum(argument.nbytes for argument in args if isinstance(argument, torch.Tensor)))
            result = func(*args, **(kwargs or {}))
            assert result.nbytes < 100
            return result

    properties = SimpleNamespace(L2_cache_size=cache_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    flush = cache_flush(CPU)
    with Noted():
        flush()
    assert sum(read) >= FLUSH_FACTOR * cache_bytes > cache_bytes


def test_the_bottleneck_is_what_takes_longer_in_all():
    assert bottleneck([Timing(1.0, 0.5), Timing(0.1, 0.5)]) == "device_ms"
    assert bottleneck([Timing(1.0, 0.9), Timing(0.1, 0.9)]) == "host_ms"
    assert bottleneck([Timing(0.0, 0.0)]) == "device_ms"


def test_only_a_gpu_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    wait_for(torch.device("cpu"))
    wait_for(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]
