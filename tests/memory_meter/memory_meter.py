"""Meter of the bytes of torch's CPU tensors, between libc10 and the C library, with an optional limit.

The meter does not depend on torch's profiler or on Adacc's counts. It works in processes that `python
tests/memory_meter` started, or that have `environment()`. Memory mapped from files, and numpy's memory, do not come
from torch's allocator and are not counted.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from adacc_hf.kernels._compiler import build

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ldl")
_NO_LIMIT = 2**63 - 1


def environment() -> dict[str, str]:
    """Return the environment variables of a metered process. Compile the meter if necessary."""
    library = build(Path(__file__).with_name("meter.cpp"), _FLAGS)
    others = os.environ.get("LD_PRELOAD", "").split()
    return {"LD_PRELOAD": " ".join([str(library), *(other for other in others if other != str(library))])}


@dataclass(frozen=True)
class MemoryMeter:
    """Meter of this process. Raises RuntimeError if the meter is not preloaded."""

    def __post_init__(self) -> None:
        if not hasattr(ctypes.CDLL(None), "memory_meter_live"):
            raise RuntimeError("this process has no meter: start it with `python tests/memory_meter script.py`")

    @property
    def live_bytes(self) -> int:
        return self._ask("live")

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes since the start, or since `reset_peak`."""
        return self._ask("peak")

    @property
    def num_refusals(self) -> int:
        """Number of allocations that failed because of the limit."""
        return self._ask("refusals")

    def reset_peak(self) -> None:
        ctypes.CDLL(None).memory_meter_reset_peak()

    def limit(self, nbytes: int | None) -> None:
        """Limit torch's memory to `nbytes` in total. Torch raises its usual error above it. None removes the limit."""
        ctypes.CDLL(None).memory_meter_limit(ctypes.c_int64(_NO_LIMIT if nbytes is None else nbytes))

    def _ask(self, name: str) -> int:
        function = getattr(ctypes.CDLL(None), f"memory_meter_{name}")
        function.restype = ctypes.c_int64
        return function()
