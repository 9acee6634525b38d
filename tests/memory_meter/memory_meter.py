"""Counts the bytes of torch's tensors on the CPU between libc10 and the C library, and refuses those above a limit.

Independent of what torch's profiler and Adacc count. It is there in processes that `python tests/memory_meter` started,
or that have `environment()`; what was mapped from files, or belongs to numpy, is not of the allocator and not counted.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from adacc_hf.kernels._compiler import build

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ldl")
_NO_LIMIT = 2**63 - 1


def environment() -> dict[str, str]:
    """What to add to the environment of a process that is to be metered. Compiles the meter if need be."""
    library = build(Path(__file__).with_name("meter.cpp"), _FLAGS)
    others = os.environ.get("LD_PRELOAD", "").split()
    return {"LD_PRELOAD": " ".join([str(library), *(other for other in others if other != str(library))])}


@dataclass(frozen=True)
class MemoryMeter:
    """This process's meter. Raises RuntimeError where it was not preloaded."""

    def __post_init__(self) -> None:
        if not hasattr(ctypes.CDLL(None), "memory_meter_live"):
            raise RuntimeError("this process has no meter: start it with `python tests/memory_meter script.py`")

    @property
    def live_bytes(self) -> int:
        return self._ask("live")

    @property
    def peak_bytes(self) -> int:
        """Most bytes live since the start, or since `reset_peak`."""
        return self._ask("peak")

    @property
    def num_refusals(self) -> int:
        """Allocations that the limit made fail."""
        return self._ask("refusals")

    def reset_peak(self) -> None:
        ctypes.CDLL(None).memory_meter_reset_peak()

    def limit(self, nbytes: int | None) -> None:
        """From now on torch gets no memory above `nbytes` in all, and raises what it raises then; None lifts this."""
        ctypes.CDLL(None).memory_meter_limit(ctypes.c_int64(_NO_LIMIT if nbytes is None else nbytes))

    def _ask(self, name: str) -> int:
        function = getattr(ctypes.CDLL(None), f"memory_meter_{name}")
        function.restype = ctypes.c_int64
        return function()
