"""Times of operators and codecs, counted from bytes and operations, so that no policy depends on the machine or its
load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest


@contextmanager
def count_times(device_type: str = "cpu") -> Iterator[None]:
    """Replace the times on a device that decide policies. Times of steps are measured: no policy depends on them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from adacc_hf.estimate.devices import Device
    from adacc_hf.estimate.fake_measurement import operator_ms, transfer_ms
    from adacc_hf.price import codec_selection, measurement, timing

    rates = {"flops": {"float32": 1e11}, "bandwidth_bytes": 2e10, "launch_ms": 2e-3}
    device = Device(name="counted", title="One core", source="", memory_bytes=0, trace="cpu", **rates)

    class Work(TorchDispatchMode):
        """Dispatch mode that adds up times. An allocation stands for the call of C++ that fills it, in a codec."""

        ms = device.launch_ms

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # compiled code stays compiled

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "aten" and func.overloadpacket.__name__.startswith(("empty", "new_empty")):
                self.ms += 3 * device.launch_ms + transfer_ms(device, result.nbytes)
            else:
                self.ms += operator_ms(device, func, args, kwargs or {}, result)
            return result

    measured_time_of = timing.time_of

    def time_of(run: Callable[[], object], on: torch.device, repeats: int = 1) -> timing.Timing:
        if on.type != device_type:
            return measured_time_of(run, on, repeats)
        with Work() as work:
            run()
        return timing.Timing(work.ms, work.ms)

    with (
        mock.patch.object(timing, "time_of", time_of),
        mock.patch.object(measurement, "time_of", time_of),
        mock.patch.object(codec_selection, "time_of", time_of),
    ):
        yield


@pytest.fixture(autouse=True, scope="module")
def counted_times() -> Iterator[None]:
    """Apply `count_times` to all tests. A file about times replaces this fixture by one that does nothing."""
    with count_times():
        yield
