"""The account that torch's CPU allocator keeps while memory is profiled, with what every thread frees."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

_LIBRARY = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


_THRESHOLD = "FLAGS_caffe2_log_level"
_ERROR = 2
"""c10's level of errors: 0 is information, 1 warnings."""


def _find(name: str, kind: type[Any]) -> Any:
    """c10's variable `name`, of the ctypes class `kind`; None in a build without it."""
    try:
        return kind.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY)), name)
    except (OSError, ValueError):
        return None


flag: ctypes.c_bool | None = _find(_FLAG, ctypes.c_bool)
"""The switch by which every thread enters what it takes and frees."""
threshold: ctypes.c_int | None = _find(_THRESHOLD, ctypes.c_int)
"""The level from which c10 writes to stderr; Python's warnings, and torch's that become such, do not ask it."""


@contextmanager
def all_threads_counted() -> Iterator[None]:
    """While open, every thread keeps the account of the CPU's allocator, and not the profiled one alone.

    Gloo's threads are often the last to hold a tensor that ranks have exchanged: it would count as live for good. Where
    `flag` is None it still does.

    c10 warns of each thousandth block that is freed and was taken before, from the first one on, by which nobody is
    helped: its warnings, of which it has hardly others, are not written meanwhile; its errors are.
    """
    with ExitStack() as changed:
        if flag is not None:
            changed.enter_context(_set_to(flag, True))
        if threshold is not None:
            changed.enter_context(_set_to(threshold, max(_ERROR, threshold.value)))
        yield


@contextmanager
def _set_to(variable: Any, value: Any) -> Iterator[None]:
    before, variable.value = variable.value, value
    try:
        yield
    finally:
        variable.value = before


def readings(profiled: profile, mark: str) -> list[int | None]:
    """Bytes live after each event of the allocator in the profiled thread, and None for each record named `mark`.

    In order of time, and relative to the start. What another thread frees shows in the next event.
    """
    found = []
    nodes: list[Any] = list(profiled.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        name = node.name
        if name == mark:
            found.append((node.start_time_ns, None))
        elif name == "[memory]":
            found.append((node.start_time_ns, node.extra_fields))
    found.sort(key=lambda event: event[0])
    first = next((event for _, event in found if event is not None), None)
    start = 0 if first is None else first.total_allocated - first.alloc_size
    return [None if event is None else event.total_allocated - start for _, event in found]
