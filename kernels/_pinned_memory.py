"""Pinned memory of the host, which forked processes do not inherit."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from contextlib import suppress
from weakref import WeakSet

import torch

log = logging.getLogger(__name__)


class PinnedMemory(mmap.mmap):
    """Memory of this process, pinned if possible.

    Forked processes, such as the workers of a DataLoader, do not inherit the memory: they would keep it in use after
    this process has freed it. Where the system does not support this, the memory is shared with them. A private mapping
    is not used, because it would be copied at the first write after a fork, and the device would still use the original
    pages.
    """

    is_pinned = False

    def __new__(cls, nbytes: int) -> PinnedMemory:
        try:
            memory = super().__new__(cls, -1, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(
                f"{nbytes / 2**30:.2f} GiB of host memory for payloads cannot be allocated ({error}): set a smaller "
                f"AdaccConfig(host_memory=...), or host_memory=None, or free memory of the host (free -h, ulimit -v, "
                f"the limit of the container)"
            ) from error
        if hasattr(mmap, "MADV_DONTFORK"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_DONTFORK)
        _memories.add(memory)
        return memory

    def pin(self, address: int) -> None:
        """Pin the memory, if CUDA is available. If pinning fails, log a warning."""
        if not torch.cuda.is_available():
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        self._address, self._process, self.is_pinned = address, os.getpid(), code == 0
        if code:
            with suppress(RuntimeError):  # clear the error, which torch would raise at its next kernel launch
                torch.zeros(1, device="cuda")
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


_memories: WeakSet[PinnedMemory] = WeakSet()


def _keep_in_child() -> None:
    """Keep all `PinnedMemory` objects alive for ever in a forked process. If one were deleted there, it would unmap its
    addresses, which the forked process may use for something else."""
    for memory in _memories:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)
