"""Events of torch's CPU allocator: recording of the events of all threads, and computation of live bytes from them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

_LIBRARY = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
_ALL_THREADS_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


_LOG_LEVEL = "FLAGS_caffe2_log_level"
_ERROR = 2
"""Log level for errors in c10, torch's core library. Level 0 is information, and level 1 is warnings."""


def _c10_variable(name: str, kind: type[Any]) -> Any:
    """Return the variable `name` of c10, torch's core library, as an object of the ctypes class `kind`. Return None if
    this build has no such variable."""
    try:
        return kind.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY)), name)
    except (OSError, ValueError):
        return None


all_threads_flag: ctypes.c_bool | None = _c10_variable(_ALL_THREADS_FLAG, ctypes.c_bool)
"""Variable of torch's core library that makes all threads report their allocations and frees to the profiler, or
None."""
log_level: ctypes.c_int | None = _c10_variable(_LOG_LEVEL, ctypes.c_int)
"""Variable of torch's core library, c10: the minimum level of messages that it writes to stderr. The level does not
affect Python warnings."""


@contextmanager
def count_all_threads() -> Iterator[None]:
    """Make torch's memory profiler record CPU allocations and frees of all threads inside the `with` block.

    By default the profiler records only the profiled thread. Gloo's threads are often the last to free a tensor that
    ranks have exchanged. Without the records of these threads, the tensor would count as live forever. In a build of
    torch without the flag (`all_threads_flag` is None), this context has no effect on the count.

    torch's core library, c10, warns about freed blocks of memory whose allocation the profiler did not record: about
    the first freed block, then about each thousandth. The warnings are useless here, and c10 has hardly any other
    warnings, so only c10's errors are written inside the `with` block.
    """
    with ExitStack() as stack:
        if all_threads_flag is not None:
            stack.enter_context(_profiler_variable_set(all_threads_flag, True))
        if log_level is not None:
            stack.enter_context(_profiler_variable_set(log_level, max(_ERROR, log_level.value)))
        yield


@contextmanager
def _profiler_variable_set(variable: Any, value: Any) -> Iterator[None]:
    before, variable.value = variable.value, value
    try:
        yield
    finally:
        variable.value = before


def allocator_readings(sessions: Sequence[profile], mark: str) -> list[int | None]:
    """Return the live bytes after each CPU allocator event that the profiler recorded in `sessions`, in order of time.

    The list contains None at the place of each `record_function` with the name `mark`. The bytes are relative to the
    first event. Only events of the profiled thread are listed. Bytes freed by another thread are counted at the next
    listed event. The first event of each session after the first one is listed, so that it shows what was allocated
    between the sessions.
    """
    events = []
    for session in sessions:
        assert session.kineto_results is not None  # the session has ended
        nodes: list[Any] = list(session.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes += node.children
            name = node.name
            if name == mark:
                events.append((node.start_time_ns, None))
            elif name == "[memory]":
                events.append((node.start_time_ns, node.extra_fields))
    events.sort(key=lambda event: event[0])
    first = next((event for _, event in events if event is not None), None)
    start = 0 if first is None else first.total_allocated - first.alloc_size
    return [None if event is None else event.total_allocated - start for _, event in events]
