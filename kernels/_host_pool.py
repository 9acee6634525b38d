"""Pool of pinned host memory, in which codecs can store payloads (encoded tensors) to save device memory.

NOTE [Order of copies]. All copies to and from the pool are ordered, also if they run on several streams: before each
copy, the stream of the copy waits for the stream of the previous copy. A range of the pool can therefore be used again
as soon as the `HostBlock` in the range is deleted, although copies of its tensors may still be pending. If all copies
are on one stream, no copy waits.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adacc_hf.kernels._host_payloads import aligned
from adacc_hf.kernels._pinned_memory import PinnedMemory

log = logging.getLogger(__name__)


class _HostArena:
    """One contiguous range of host memory, with a list of the free parts of the range."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = PinnedMemory(nbytes)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        """The whole range as one tensor. This tensor and its views keep the memory alive."""
        memory.pin(self.bytes.data_ptr())
        self.is_pinned = memory.is_pinned
        self.free = [(0, nbytes)]
        """(offset, bytes) of the free parts, in order. Adjacent free parts are merged."""
        self.returned: deque[tuple[int, int]] = deque()
        """(offset, bytes) of parts whose `HostBlock` was deleted and that are not merged into `free` yet.

        Blocks may be deleted on any thread, and within any other call. A deque is safe in this case.
        """

    @property
    def live_bytes(self) -> int:
        self._collect()
        return self.nbytes - sum(nbytes for _, nbytes in self.free)

    def take(self, nbytes: int) -> int | None:
        """Mark a free part of `nbytes` as used, and return its offset, or None if no free part is large enough."""
        self._collect()
        for place, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                rest = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                self.free[place : place + 1] = rest
                return offset
        return None

    def _collect(self) -> None:
        """Merge the parts of deleted `HostBlock`s into the free parts."""
        while self.returned:
            insort(self.free, self.returned.popleft())
        merged: list[tuple[int, int]] = []
        for offset, nbytes in self.free:
            if merged and sum(merged[-1]) == offset:
                offset, nbytes = merged[-1][0], merged.pop()[1] + nbytes
            merged.append((offset, nbytes))
        self.free = merged


class HostBlock:
    """Tensors in the pool of host memory. Their memory becomes free when this object is deleted."""

    __slots__ = ("_arena", "_offset", "nbytes", "process", "tensors")

    def __init__(self, arena: _HostArena, offset: int, tensors: Sequence[Tensor]) -> None:
        self._arena, self._offset, self.process = arena, offset, os.getpid()
        self.nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        begin, views = offset, []
        for tensor in tensors:
            views.append(arena.bytes[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            begin += aligned(tensor.nbytes)
        self.tensors = tuple(views)

    @property
    def is_pinned(self) -> bool:
        return self._arena.is_pinned

    def __del__(self) -> None:
        self._arena.returned.append((self._offset, self.nbytes))


@dataclass(slots=True)
class _Reservation:
    """Bytes that a user of the pool of host memory has reserved, and the model to which the stored tensors belong."""

    nbytes: int
    model: weakref.ref[Any] | None
    finalizer: weakref.finalize[..., Any]  # ends the reservation


class HostPool:
    """Pool of host memory for payloads (encoded tensors). The pool is as large as the sum of its users' reservations. A
    forked process has an empty pool of its own."""

    def __init__(self) -> None:
        self._reservations: dict[int, _Reservation] = {}
        """Reservations by the id of the object that uses the pool. The garbage collector may end a reservation at any
        moment, also within a method of this pool, so methods iterate over a copy, and read `_arena` once."""
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        """Start without memory, in a new pool or in a forked process."""
        self._lock = threading.RLock()
        self._arena: _HostArena | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._has_warned = False
        self._peak_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the pool holds."""
        arena = self._arena
        return 0 if arena is None else arena.nbytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the pool that stored tensors use now."""
        with self._lock:
            arena = self._arena
            return 0 if arena is None else arena.live_bytes

    def take_peak(self) -> int:
        """Return the maximum of `live_bytes` since the last call of this method."""
        with self._lock:
            peak, self._peak_bytes = self._peak_bytes, self.live_bytes
            return peak

    def reserve(self, user: object, nbytes: int, model: object = None) -> None:
        """Make room in the pool for `nbytes` of payloads (encoded tensors) of `user`. If `user` has reserved more
        already, keep this reservation.

        The payloads belong to `model`. The reservation ends with `release`, or when `user` is deleted. The memory is
        allocated immediately, and not at the first copy, because pinning memory waits for the device. If payloads are
        live, the pool grows later, when no payload is live. Raises MemoryError if the memory cannot be allocated.
        """
        with self._lock:
            reservation = self._reservations.get(id(user))
            if reservation is None:
                finalizer = weakref.finalize(user, _end_reservation, weakref.ref(self), id(user))
                finalizer.atexit = False
                reservation = _Reservation(0, None if model is None else weakref.ref(model), finalizer)
                self._reservations[id(user)] = reservation
            earlier_bytes, reservation.nbytes = reservation.nbytes, max(nbytes, reservation.nbytes)
            try:
                self._grow()
            except MemoryError:
                reservation.nbytes = earlier_bytes
                raise

    def reserved_for_others(self, model: object) -> int:
        """Return the bytes that are reserved for payloads (encoded tensors) of models other than `model`."""
        reservations = self._reservations.copy().values()
        return sum(aligned(r.nbytes) for r in reservations if r.model is None or r.model() is not model)

    def _grow(self) -> None:
        """Allocate the reserved bytes. Do nothing if the pool has them already, or if the pool holds tensors now."""
        reserved_bytes = sum(aligned(reservation.nbytes) for reservation in self._reservations.copy().values())
        if reserved_bytes > self.nbytes and not self.live_bytes:
            self._arena = None  # free the memory before more is allocated
            self._arena = _HostArena(reserved_bytes)
            self._has_warned = False

    def release(self, user: object) -> None:
        """End the reservation of `user`. The pool's memory is freed once there are no reservations and no stored
        tensors."""
        reservation = self._reservations.get(id(user))
        if reservation is not None:
            reservation.finalizer()

    def end_reservation(self, user_id: int) -> None:
        """End the reservation of the user with this id, which has released it, or is being deleted."""
        self._reservations.pop(user_id, None)
        if not self._reservations:
            self._arena = None

    def store(self, tensors: Sequence[Tensor]) -> HostBlock | None:
        """Copy `tensors`, all on one device, into the pool. If the pool has no room, warn once and return None."""
        device, nbytes = tensors[0].device, sum(aligned(tensor.nbytes) for tensor in tensors)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "payloads in host memory cannot be copied within a CUDA graph: capture the graph under a policy "
                "without host memory (AdaccConfig(host_memory=None))"
            )
        with self._lock:
            self._grow()
            arena = self._arena
            offset = None if arena is None else arena.take(nbytes)
            if arena is None or offset is None:
                self._warn_full(nbytes)
                return None
            block = HostBlock(arena, offset, tensors)
            self._peak_bytes = max(self._peak_bytes, arena.live_bytes)
            self._follow_last_copy(device)
            for copy, tensor in zip(block.tensors, tensors, strict=True):
                copy.copy_(tensor, non_blocking=block.is_pinned)
            return block

    def load(self, block: HostBlock, device: torch.device) -> tuple[Tensor, ...]:
        """Return new tensors on `device` with the contents of `block`."""
        if block.process != os.getpid():
            raise RuntimeError(
                "payloads in host memory cannot be read in a forked process: run forward and backward in one process, "
                "or start processes with the method spawn, or set AdaccConfig(host_memory=None)"
            )
        with self._lock:
            self._follow_last_copy(device)
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in block.tensors]
            return tuple(
                copy.copy_(tensor, non_blocking=block.is_pinned)
                for copy, tensor in zip(copies, block.tensors, strict=True)
            )

    def _follow_last_copy(self, device: torch.device) -> None:
        """Make the current stream wait for the pool's previous copy on another stream (NOTE [Order of copies])."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def _warn_full(self, nbytes: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "Adacc: the pool of host memory has no room for %d more bytes (%d of %d in use): such payloads stay on the "
            "device. More bytes are stored than the policy predicts, for example by two forwards before a backward",
            nbytes,
            self.live_bytes,
            self.nbytes,
        )


def _end_reservation(pool: weakref.ref[HostPool], user_id: int) -> None:
    referent = pool()
    if referent is not None:
        referent.end_reservation(user_id)


_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()
host_pool = HostPool()
"""The pool of pinned host memory of this process."""


def _begin_in_child() -> None:
    """Make all pools start without memory in a forked process. Reservations stay, and are allocated when needed."""
    for pool in _pools:
        pool._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
