"""Pool of pinned host memory. Codecs can store payloads there instead of in the device's memory.

NOTE [Order of copies]. All copies to and from the pool are ordered, also if they run on several streams: before each
copy, its stream waits for the stream of the previous copy. A range of the pool can therefore be used again as soon as
its block is deleted, although the copies of that block may still be pending. On one stream, no copy waits for the host.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from bisect import insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT = 512
"""Multiple in bytes to which the tensors of the pool are rounded up."""
ROUNDING_BYTES = 4 * ALIGNMENT
"""Upper bound of the bytes by which the tensors of one payload, at most four, are rounded up."""


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _HostMemory(mmap.mmap):
    """Memory of this process, pinned if possible, and shared with forked processes: a private mapping would be copied
    at the first write after a fork, and the device would still use the original pages."""

    is_pinned = False

    def pin(self, address: int) -> None:
        """Pin the memory, if CUDA is available. If that fails, log a warning."""
        if not torch.cuda.is_available():
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        self._address, self._process, self.is_pinned = address, os.getpid(), code == 0
        if code:
            _clear_cuda_error()
            log.warning(
                "Adacc: %.2f GiB of host memory cannot be pinned (CUDA error %d): the pool for payloads uses pageable "
                "memory, whose copies are several times slower. Set a smaller host_memory, or raise the limit on "
                "locked memory (ulimit -l; WSL2 pins 1 to 2 GiB)",
                len(self) / 2**30,
                code,
            )

    def __del__(self) -> None:
        is_own = self.is_pinned and self._process == os.getpid()  # a forked process cannot use CUDA
        if is_own and not sys.is_finalizing():
            torch.cuda.synchronize()  # copies may be pending
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _clear_cuda_error() -> None:
    """Clear the error that a failed call of CUDA leaves behind. Otherwise torch's next kernel launch would raise it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


class _HostArena:
    """One range of the pool's pinned host memory, and the parts of it that are free."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = _HostMemory(-1, nbytes)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        """All of the memory. This tensor and its views keep the memory alive."""
        memory.pin(self.bytes.data_ptr())
        self.is_pinned = memory.is_pinned
        self.free = [(0, nbytes)]
        """(offset, bytes) of the free parts, in order. Neighbours are merged."""
        self.returned: deque[tuple[int, int]] = deque()
        """(offset, bytes) of parts whose block was deleted, before they are merged into `free`. A deque, because blocks
        may be deleted on any thread, and within any other call."""

    @property
    def live_bytes(self) -> int:
        self._collect()
        return self.nbytes - sum(nbytes for _, nbytes in self.free)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free part of `nbytes`, which is then in use; None if there is none."""
        self._collect()
        for place, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                rest = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                self.free[place : place + 1] = rest
                return offset
        return None

    def _collect(self) -> None:
        """Merge the parts of deleted blocks into the free parts."""
        while self.returned:
            insort(self.free, self.returned.popleft())
        merged: list[tuple[int, int]] = []
        for offset, nbytes in self.free:
            if merged and sum(merged[-1]) == offset:
                offset, nbytes = merged[-1][0], merged.pop()[1] + nbytes
            merged.append((offset, nbytes))
        self.free = merged


class HostBlock:
    """Tensors in the pool. Their memory is free again when this object is deleted."""

    __slots__ = ("_arena", "_offset", "nbytes", "tensors")

    def __init__(self, arena: _HostArena, offset: int, tensors: Sequence[Tensor]) -> None:
        self._arena, self._offset = arena, offset
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


class HostPool:
    """Pool of host memory for payloads. Its size is the sum of the reservations of its users."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._arena: _HostArena | None = None
        self._reservations: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._reserved_bytes = 0
        self._last_stream: torch.cuda.Stream | None = None
        self._has_warned = False
        self._peak_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the pool holds."""
        with self._lock:
            return 0 if self._arena is None else self._arena.nbytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the pool that payloads use now."""
        with self._lock:
            return 0 if self._arena is None else self._arena.live_bytes

    def take_peak(self) -> int:
        """Return the maximum of `live_bytes` since the last call."""
        with self._lock:
            peak, self._peak_bytes = self._peak_bytes, self.live_bytes
            return peak

    def reserve(self, user: object, nbytes: int) -> None:
        """Make room for `nbytes` of payloads of `user`, or more if `user` has reserved more already.

        The memory is allocated immediately, because pinning memory waits for the device. If payloads are live, the pool
        grows later, when no payload is live.
        """
        with self._lock:
            if nbytes > self._reservations.get(user, 0):
                self._reservations[user] = nbytes
            self._reserved_bytes = sum(aligned(reserved) for reserved in self._reservations.values())
            self._grow()

    def _grow(self) -> None:
        """Allocate the reserved bytes, unless the pool has them or payloads are live."""
        if self._reserved_bytes > self.nbytes and not self.live_bytes:
            self._arena = None  # free the memory before more is allocated
            self._arena = _HostArena(self._reserved_bytes)
            self._has_warned = False

    def release(self, user: object) -> None:
        """End the reservation of `user`. The memory is freed with the last reservation, and with its last payload."""
        with self._lock:
            self._reservations.pop(user, None)
            self._reserved_bytes = sum(aligned(reserved) for reserved in self._reservations.values())
            if not self._reservations:
                self._arena = self._last_stream = None

    def store(self, tensors: Sequence[Tensor]) -> HostBlock | None:
        """Copy `tensors` of one device into the pool. Return None, and warn once, if the pool has no room."""
        device, nbytes = tensors[0].device, sum(aligned(tensor.nbytes) for tensor in tensors)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "payloads in host memory cannot be copied within a CUDA graph: capture the graph under a policy "
                "without host memory (AdaccConfig(host_memory=None))"
            )
        with self._lock:
            self._grow()
            offset = None if self._arena is None else self._arena.take(nbytes)
            if self._arena is None or offset is None:
                self._warn_full(nbytes)
                return None
            block = HostBlock(self._arena, offset, tensors)
            self._peak_bytes = max(self._peak_bytes, self._arena.live_bytes)
            self._follow_last_copy(device)
            for copy, tensor in zip(block.tensors, tensors, strict=True):
                copy.copy_(tensor, non_blocking=block.is_pinned)
            return block

    def load(self, block: HostBlock, device: torch.device) -> tuple[Tensor, ...]:
        """Return new tensors on `device` with the contents of `block`."""
        with self._lock:
            self._follow_last_copy(device)
            copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in block.tensors]
            return tuple(
                copy.copy_(tensor, non_blocking=block.is_pinned)
                for copy, tensor in zip(copies, block.tensors, strict=True)
            )

    def _follow_last_copy(self, device: torch.device) -> None:
        """Make the current stream wait for the previous copy, if that copy ran on another stream (NOTE [Order of
        copies])."""
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


host_pool = HostPool()
"""The pool of this process."""
