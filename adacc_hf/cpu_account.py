"""The account that torch's CPU allocator keeps while memory is profiled, with what every thread frees."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

_LIBRARY = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


def _find_flag() -> ctypes.c_bool | None:
    """The switch of c10 by which every thread enters what it takes and frees; None in a build without it."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY)), _FLAG)
    except (OSError, ValueError):
        return None


flag = _find_flag()


@contextmanager
def all_threads_counted() -> Iterator[None]:
    """While open, every thread keeps the account of the CPU's allocator, and not the profiled one alone.

    Gloo's threads are often the last to hold a tensor that ranks have exchanged: it would count as live for good. Where
    `flag` is None it still does.
    """
    if flag is None:
        yield
        return
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


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
