"""Events of torch's CPU allocator: recording of the events of all threads, and computation of live bytes from them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

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


MARK_BYTES = 64
"""Bytes of the storage that marks a moment among the allocations."""

_session_of: dict[int, int] = {}
"""Number of the session that recorded the allocation of a storage, by the storage's address. Frees outside of sessions
are unknown here, as they are to the profiler."""
_session_numbers = count()


class AllocatorEvent(NamedTuple):
    """An allocation, or a free, which has negative `nbytes`, by the profiled thread."""

    address: int
    nbytes: int
    total_bytes: int
    """Bytes that the profiler counts as live after the event, in all threads."""
    session: int
    """Number of the session that recorded the storage's allocation."""
    is_inner: bool = False
    """True if the event occurred while an inner meter measured."""


def read_session(session: profile) -> list[AllocatorEvent]:
    """Return the events of a profiler's session in order of time. Call this once, right after the session has ended."""
    assert session.kineto_results is not None  # the session has ended
    number, events = next(_session_numbers), []
    for node in sorted(session.kineto_results.experimental_event_tree(), key=lambda node: node.start_time_ns):
        fields: Any = node.extra_fields
        if fields.alloc_size >= 0:
            allocated_in = _session_of[fields.ptr] = number
        else:
            allocated_in = _session_of.pop(fields.ptr, number)  # absent if another thread allocated the storage
        events.append(AllocatorEvent(fields.ptr, fields.alloc_size, fields.total_allocated, allocated_in))
    return events


def old_frees(events: Sequence[AllocatorEvent]) -> list[AllocatorEvent]:
    """Return those of a meter's `events` that free storages which a session before the meter's first one recorded.

    The profiler does not know storages from between the sessions, and counts no free of theirs. But if such a storage
    has the address of one whose free it missed, it counts a free, with the bytes of the latter.
    """
    return [event for event in events if event.nbytes < 0 and event.session < events[0].session]


def allocator_readings(events: Sequence[AllocatorEvent], mark_addresses: Iterable[int]) -> list[int | None]:
    """Return the live bytes after each of the `events` of a meter's sessions, which are in order of time.

    Each mark is a storage of MARK_BYTES that is alive until the last session ends. `mark_addresses` are the addresses
    of these storages. The list contains None at the place of each mark, and its bytes do not include the marks. The
    bytes are relative to the first event. Storages from before the first event have no effect on them, nor have
    `old_frees`. Only events of the profiled thread are listed. Bytes freed by another thread are counted at the next
    listed event. The first event of each session after the first one is listed, so that it shows what was allocated
    between the sessions, by inner meters for example.
    """
    last_events = {event.address: index for index, event in enumerate(events)}
    marks = {last_events[address] for address in mark_addresses}
    start = events[0].total_bytes - events[0].nbytes if events else 0
    old = set(map(id, old_frees(events)))
    readings: list[int | None] = []
    for index, event in enumerate(events):
        start += MARK_BYTES * (index in marks) + event.nbytes * (id(event) in old)
        if not event.is_inner:
            readings.append(None if index in marks else event.total_bytes - start)
    return readings
