"""Events of torch's CPU allocator: recording of the events of all threads, and computation of live bytes from them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

_LIBRARY = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
_ERROR = 2  # c10's log level for errors; 0 is information, 1 is warnings


def _c10_variable(name: str, kind: type[Any]) -> Any:
    """Return the variable `name` of c10, torch's core library, as an object of the ctypes class `kind`, or None."""
    try:
        return kind.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY)), name)
    except (OSError, ValueError):
        return None


# Makes all threads report their allocations and frees to the profiler.
all_threads_flag: ctypes.c_bool | None = _c10_variable("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool)
# Least level of messages that c10 writes to stderr. Python warnings do not depend on it.
log_level: ctypes.c_int | None = _c10_variable("FLAGS_caffe2_log_level", ctypes.c_int)


@contextmanager
def count_all_threads() -> Iterator[None]:
    """Make torch's memory profiler record CPU allocations and frees of all threads inside the `with` block.

    Gloo's threads are often the last to free a tensor that ranks have exchanged, which would then count as live
    forever. c10's warnings, which are about freed blocks whose allocation the profiler did not record, are dropped.
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


MARK_BYTES = 64  # of the storage that marks a moment among the allocations

_session_of: dict[int, int] = {}
"""Number of the session that recorded the allocation of a storage, by the storage's address. Frees outside of sessions
are unknown here, as they are to the profiler."""
_session_numbers = count()


class AllocatorEvents:
    """Allocations and frees by the profiled thread in the sessions of one meter, in order of time."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._totals: list[int] = []
        """Bytes that the profiler counts as live after each event, in all threads."""
        self._start = self._first_session = 0
        """Bytes that the profiler counts as live before the first event, and the number of the first session."""
        self._frees: list[tuple[int, int, int]] = []
        """(number of earlier events, -bytes, session) of each free of a storage whose allocation an earlier session has
        recorded, those in the `with` block of an inner meter included."""

    def read(self, session: profile) -> None:
        """Add the events of a profiler's session. Call this right after the session has ended."""
        assert session.kineto_results is not None  # the session has ended
        nodes: Any = sorted(session.kineto_results.experimental_event_tree(), key=lambda node: node.start_time_ns)
        number, addresses, totals = next(_session_numbers), self._addresses, self._totals
        for event in (node.extra_fields for node in nodes if hasattr(node.extra_fields, "ptr")):  # others were refused
            address, nbytes = event.ptr, event.alloc_size
            if nbytes >= 0:
                _session_of[address] = number
            elif (earlier := _session_of.pop(address, number)) < number:  # absent if another thread allocated it
                self._frees.append((len(totals), nbytes, earlier))
            if not totals:
                self._start, self._first_session = event.total_allocated - nbytes, number
            addresses.append(address)
            totals.append(event.total_allocated)

    def include(self, inner: AllocatorEvents) -> None:
        """Add the frees of the meter `inner`, which has measured inside the `with` block of this one."""
        self._frees += [(len(self._totals), nbytes, session) for _, nbytes, session in inner._frees]

    def readings(self, mark_addresses: Iterable[int]) -> list[int | None]:
        """Return the live bytes after each event.

        Each mark is a storage of MARK_BYTES that is alive until the last session ends. `mark_addresses` are the
        addresses of these storages. The list contains None at the place of each mark, and its bytes do not include the
        marks. The bytes are relative to the first event. Bytes freed by another thread, or allocated between two
        sessions, are counted at the next event.

        Storages from before the first event have no effect. If an earlier session recorded such a storage, the profiler
        subtracts its bytes when it is freed, and this method adds them back. The profiler misses frees between
        sessions: it takes the free of a new storage at the same address for the free of the old one.
        """
        last_events = dict(zip(self._addresses, range(len(self._addresses)), strict=True))
        marks = {last_events[address] for address in mark_addresses}
        starts = dict.fromkeys(marks, MARK_BYTES)
        for index, nbytes, session in self._frees:
            if session < self._first_session:
                starts[index] = starts.get(index, 0) + nbytes
        start, readings = self._start, list[int | None]()
        for index, total in enumerate(self._totals):
            start += starts.get(index, 0)
            readings.append(None if index in marks else total - start)
        return readings
