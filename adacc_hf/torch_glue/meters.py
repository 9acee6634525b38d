"""Meters of live bytes over time, as the allocator counts them, temporaries and all threads included."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.profiler import profile

from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.torch_glue.private import before_profilers_start, functions_unprofiled, is_profiling


def refuse_unmeasurable(model: nn.Module) -> None:
    """Raise ValueError if `model` is on a device whose memory cannot be measured, such as MPS, XPU or NPU."""
    MemoryMeter.for_device(next((parameter.device for parameter in model.parameters()), torch.device("cpu")))


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Live bytes at a mark of a memory meter, and their maximum until the next mark, relative to the meter's start."""

    label: tuple[Any, ...]
    live_bytes: int
    max_bytes: int


class MemoryMeter(AbstractContextManager["MemoryMeter"]):
    """Context manager that measures the live bytes of one device at and between marks that the caller sets. `points` is
    set on exit."""

    points: list[MemoryPoint]
    is_open = False

    def mark(self, label: tuple[Any, ...], dying_bytes: int = 0) -> None:
        """Set a mark named `label`. `dying_bytes`, which are freed immediately after the mark, do not count in the
        maximum that follows in `CpuMemoryMeter`. Outside the meter's `with` block, do nothing: code that reports freed
        tensors may call this method at any time."""
        if self.is_open:
            self._mark(label, dying_bytes)

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        """Maximum of the live bytes over the whole measurement."""
        return max(point.max_bytes for point in self.points)

    @staticmethod
    def for_device(device: torch.device) -> MemoryMeter:
        """Return a meter for `device`. Raise ValueError for a device type other than cpu and cuda."""
        if device.type == "cpu":
            return CpuMemoryMeter()
        if device.type == "cuda":
            return CudaMemoryMeter(device)
        raise ValueError(
            f"memory on device {device} cannot be measured: train on cpu or cuda (use_cpu=True in TrainingArguments), "
            f"or train without adacc_hf"
        )


# Events of torch's CPU allocator.

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
    least_values = ((all_threads_flag, True), (log_level, _ERROR))
    variables = [(variable, variable.value, least) for variable, least in least_values if variable is not None]
    for variable, value, least in variables:
        variable.value = max(value, least)
    try:
        yield
    finally:
        for variable, value, _ in variables:
            variable.value = value


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


_session_lock = threading.RLock()  # held while a CPU meter's profiler runs: a process can have only one session

_BUSY = (
    "another torch profiler {}. A process can have one at a time, and CPU memory is measured with one. Stop the other "
    "profiler first (with torch.profiler.schedule: measure before its warm-up or after its last step), or profile in "
    "another process"
)


class CpuMemoryMeter(MemoryMeter):
    """Memory meter for the CPU, which reads allocator events from torch's profiler.

    Meters of other threads wait until this meter is closed. Inside the `with` block of another meter of this thread,
    the other meter stands still: its peaks do not include what happens in the inner block, and it goes on with the live
    bytes that the inner block leaves.

    On entry, raise ProfilerConflictError if another profiler is running. If another profiler starts during the
    measurement, the measurement ends, and the meter raises ProfilerConflictError on exit.
    """

    _is_starting = False  # True while a meter itself starts a session of the profiler

    def __init__(self) -> None:
        self._context = ExitStack()
        self._was_interrupted = False
        self._labels: list[tuple[Any, ...]] = []
        self._dying_bytes: list[int] = []
        self._marks: dict[int, Any] = {}
        """One storage for each mark, by address. Alive until the measurement ends, so that the address is unique."""
        self._thread = 0  # the profiled thread, which enters the `with` block
        self._foreign_labels: deque[tuple[Any, ...]] = deque()
        """Labels of the marks that other threads have set since the last mark of the profiled thread."""
        self._session: profile | None = None
        self._events = AllocatorEvents()
        """Events of the ended sessions, which are one more than inner meters have interrupted this meter."""

    def __enter__(self) -> CpuMemoryMeter:
        self._thread = threading.get_ident()
        with ExitStack() as context:
            context.enter_context(_session_lock)
            if _open_meters:
                _open_meters[-1]._end_session()
            elif is_profiling():
                raise ProfilerConflictError(_BUSY.format("is running"))
            context.callback(self._leave)
            context.enter_context(count_all_threads())
            _open_meters.append(self)
            self._begin_session()
            context.enter_context(before_profilers_start(self._interrupt))
            self._context = context.pop_all()
        self.is_open = True
        self.mark(("start",))
        return self

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        # The profiler records nothing of other threads. Gloo's threads set marks when they are the last to free a
        # tensor: their marks are set at the next mark of the profiled thread, as their frees are counted there.
        if threading.get_ident() != self._thread or _open_meters[-1] is not self:
            self._foreign_labels.append(label)
            return
        while self._foreign_labels:
            self._add_mark(self._foreign_labels.popleft(), 0)
        self._add_mark(label, dying_bytes)

    def _add_mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._labels.append(label)
        self._dying_bytes.append(dying_bytes)
        storage = torch.UntypedStorage(MARK_BYTES, device="cpu")
        self._marks[storage.data_ptr()] = storage

    def _begin_session(self) -> None:
        CpuMemoryMeter._is_starting = True
        # The base class of torch.profiler.profile. The derived class warns in torch 2.11, or makes Python objects of
        # all events.
        self._session = profile(use_kineto=True, profile_memory=True)
        with _silenced_stderr(), functions_unprofiled():
            self._session.__enter__()
        CpuMemoryMeter._is_starting = False
        torch.empty(1, device="cpu")  # the first event defines the start of the count

    def _end_session(self) -> None:
        assert self._session is not None
        with _silenced_stderr():
            self._session.__exit__(None, None, None)
        self._events.read(self._session)

    def _leave(self) -> None:
        """End this meter's session, and let the meter around it go on."""
        if _open_meters and _open_meters[-1] is self:
            _open_meters.pop()
            self._end_session()
        self._marks = dict.fromkeys(self._marks)  # frees the storages before the outer or another meter counts
        if _open_meters:
            _open_meters[-1]._events.include(self._events)
            _open_meters[-1]._begin_session()

    def _interrupt(self) -> None:
        if self._is_starting or not _open_meters:
            return
        for meter in reversed(_open_meters):
            meter._was_interrupted, meter.is_open = True, False
        _open_meters[-1]._end_session()
        _open_meters.clear()

    def __exit__(self, error_type: object, *exception: object) -> None:
        self.is_open = False
        while self in _open_meters and (inner := _open_meters[-1]) is not self:  # closed out of order: no result
            inner._was_interrupted, inner.is_open = True, False
            inner._context.close()
        self._context.close()
        self.points = []
        if self._was_interrupted:
            if error_type is None:
                raise ProfilerConflictError(_BUSY.format("was started during the measurement"))
            return
        labels, dying_bytes = [(), *self._labels], [*self._dying_bytes, 0]  # the first point precedes the first mark
        live = live_at_mark = maximum = 0
        for reading in (*self._events.readings(self._marks), None):
            if reading is None:
                self.points.append(MemoryPoint(labels[len(self.points)], live_at_mark, maximum))
                live_at_mark = maximum = live - dying_bytes[len(self.points) - 1]
            else:
                live = reading
                maximum = max(maximum, live)
        self.points = self.points[1:]


_open_meters: list[CpuMemoryMeter] = []
"""Open meters of the thread that holds `_session_lock`, the innermost last. Only the innermost one has a session."""


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Discard all output to stderr, to which the profiler's C++ code writes a line at each start and stop."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


_peaks_before_reset: dict[torch.device, int] = {}
"""By device, the highest peak that a meter has erased from torch's statistics since the last `take_peak`."""


def _reset_peak(device: torch.device) -> None:
    """Reset torch's peak statistic. Keep the old value for `take_peak`, because torch cannot restore the statistic."""
    _peaks_before_reset[device] = max(_peaks_before_reset.get(device, 0), torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)


def take_peak() -> int:
    """Return the peak of live bytes on the current GPU since the last call, also if a meter has reset torch's peak
    statistic meanwhile, and reset the statistic."""
    device = torch.device("cuda", torch.cuda.current_device())
    peak = max(torch.cuda.max_memory_allocated(device), _peaks_before_reset.pop(device, 0))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class CudaMemoryMeter(MemoryMeter):
    """Memory meter for a GPU, which reads the statistics of torch's caching allocator without synchronising with the
    device.

    The allocator counts in units of 512 bytes. The maximum after a mark includes memory that is freed right at the
    mark, so peaks in forward may be predicted too high. Inside the `with` block of an inner meter, this meter stands
    still, as in `CpuMemoryMeter`.
    """

    _open_meters: ClassVar[list[CudaMemoryMeter]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._marks: list[tuple[tuple[Any, ...], int]] = []
        self._peaks: list[int] = []
        self._peak = 0
        """Peak since the last mark until the latest inner meter was opened."""

    def __enter__(self) -> CudaMemoryMeter:
        for outer in self._open_meters[-1:]:
            outer._peak = max(outer._peak, torch.cuda.max_memory_allocated(outer._device))
        self._open_meters.append(self)
        self._start = torch.cuda.memory_allocated(self._device)
        _reset_peak(self._device)
        self._marks.append((("start",), self._start))
        self.is_open = True
        return self

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._end_interval()
        self._marks.append((label, torch.cuda.memory_allocated(self._device)))

    def __exit__(self, *exception: object) -> None:
        self.is_open = False
        self._open_meters.remove(self)
        self._end_interval()
        self.points = [
            MemoryPoint(label, live - self._start, peak - self._start)
            for (label, live), peak in zip(self._marks, self._peaks, strict=True)
        ]

    def _end_interval(self) -> None:
        self._peaks.append(max(self._peak, torch.cuda.max_memory_allocated(self._device)))
        self._peak = 0
        _reset_peak(self._device)
