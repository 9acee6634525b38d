"""Emulated CUDA device without a GPU, for a torch that was built without CUDA. Import this module before torch.

Tensors report the device `cuda:0`. Torch behaves as with CUDA: autocast, dropout, fused attention, and a backward
thread for the device. Memory is cut into blocks like by the caching allocator, and random numbers come from a seed and
an offset. Differences from a GPU: operators are the CPU's, with the CPU's bits, nothing is asynchronous, times are
meaningless, temporaries inside operators are not counted, and there is one stream.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
import sysconfig
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from adacc_hf.kernels._compiler import build

if "torch" in sys.modules:
    raise RuntimeError("import emulated_cuda before torch, which looks for a GPU only once")
os.environ.setdefault("TRITON_INTERPRET", "1")

FIGURES = (
    "live", "peak", "requested", "peak_requested", "reserved", "peak_reserved", "limit", "total", "num_ooms"
)  # fmt: skip


def _library(name: str) -> ctypes.PyDLL:
    """Load the library of the C++ file `name` in this folder, compiled if necessary."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("the emulated CUDA device needs torch, which is not installed")
    folder = Path(spec.origin).parent
    includes = (folder / "include", folder / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    libraries = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")
    search = (f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-Wl,--no-as-needed")
    flags = ("-std=c++20", "-O1", "-fPIC", "-shared", *(f"-I{one}" for one in includes), *search, *libraries)
    source = Path(__file__).with_name(name)
    headers = [header.read_text() for header in sorted(source.parent.glob("*.h"))]
    return ctypes.PyDLL(str(build(source, flags, [version("torch"), *headers])))


_device = _library("device.cpp")

import torch  # noqa: E402  after the device is loaded

if torch.backends.cuda.is_built():
    raise RuntimeError("this torch has CUDA: the emulated device is for one that was built without")
_device.emulated_cuda_start.restype = ctypes.c_bool
if not _device.emulated_cuda_start():
    raise RuntimeError("torch did not accept the emulated device: import emulated_cuda before all other modules")
_operators = _library("operators.cpp")
_device.emulated_cuda_generator.restype = ctypes.py_object
_device.emulated_cuda_expands.restype = ctypes.c_bool


class Event:
    """Event that records the host's clock. All work is complete, because nothing is asynchronous."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end._seconds - self._seconds) * 1e3

    def synchronize(self) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream:
    """Handle of the only stream."""

    device_type, device_index, stream_id, cuda_stream = 1, 0, 0, 0
    device = torch.device("cuda", 0)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait_event = wait_stream = lambda self, other: None

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


def memory() -> SimpleNamespace:
    """Return the allocator's counts: bytes, and the number of out-of-memory errors."""
    figures = (ctypes.c_uint64 * len(FIGURES))()
    _device.emulated_cuda_memory(figures)
    return SimpleNamespace(**dict(zip(FIGURES, figures, strict=True)))


def set_limit(num_bytes: int) -> None:
    """Make allocations above `num_bytes` in total fail with torch.OutOfMemoryError."""
    _device.emulated_cuda_set_limit(ctypes.c_uint64(num_bytes))


def shrink_segments(times: int) -> None:
    """Before the first allocation, shrink segments, so that memory fragments like for a model `times` as large."""
    _device.emulated_cuda_shrink(ctypes.c_uint64(times))


def _memory_stats(device: int) -> dict[str, Any]:
    now = memory()
    counts = {
        "allocated_bytes": (now.live, now.peak),
        "requested_bytes": (now.requested, now.peak_requested),
        "reserved_bytes": (now.reserved, now.peak_reserved),
    }
    stats: dict[str, Any] = {"num_ooms": now.num_ooms, "num_alloc_retries": 0}
    return stats | {name: {"all": {"current": live, "peak": peak}} for name, (live, peak) in counts.items()}


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Emulated CUDA device",
        major=9,
        minor=0,
        total_memory=memory().total,
        multi_processor_count=108,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=166912,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=1 << 20,
        gcnArchName="",
        is_integrated=0,
    )


def _free_and_total(device: object = None) -> tuple[int, int]:
    now = memory()
    return max(0, min(now.limit, now.total) - now.reserved), now.total


class _Runtime:
    """Functions of the CUDA runtime. Host memory counts as pinned while it is registered."""

    registered: ClassVar[dict[int, int]] = {}
    """Bytes of pinned memory by address."""
    most_bytes: ClassVar[int | None] = None
    """Limit on the pinned memory in bytes, or None."""

    @classmethod
    def cudaHostRegister(cls, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  the runtime's name
        if cls.most_bytes is not None and sum(cls.registered.values()) + nbytes > cls.most_bytes:
            return 2  # cudaErrorMemoryAllocation
        cls.registered[address] = nbytes
        return 0

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:  # noqa: N802
        del cls.registered[address]
        return 0


_sync_mode = 0


def _set_sync_mode(mode: int) -> None:
    global _sync_mode
    _sync_mode = mode
    _operators.emulated_cuda_forbid_waiting(mode == 2)
    if mode:  # warn after setting the mode, like torch
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)


def _index_or_none(device: int) -> int:
    return 0 if device >= 0 else -1


_IN_C: dict[str, Any] = {
    "_cuda_getDeviceCount": lambda: 1,
    "_cuda_getDevice": lambda: 0,
    "_cuda_setDevice": lambda device: None,
    "_cuda_synchronize": lambda: None,
    "_cuda_sleep": lambda cycles: None,
    "_cuda_emptyCache": lambda *args: _device.emulated_cuda_empty_cache(),
    "_cuda_memoryStats": _memory_stats,
    "_cuda_memorySnapshot": lambda *args: {
        "segments": [{"device": 0, "is_expandable": _device.emulated_cuda_expands()}]
    },
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_resetPeakMemoryStats": lambda device: _device.emulated_cuda_reset_peak(),
    "_cuda_resetAccumulatedMemoryStats": lambda device: None,
    "_cuda_setMemoryFraction": lambda fraction, device: set_limit(int(fraction * memory().total)),
    "_cuda_getMemoryFraction": lambda device: memory().limit / memory().total,
    "_cuda_set_sync_debug_mode": _set_sync_mode,
    "_cuda_get_sync_debug_mode": lambda: _sync_mode,
    "_cuda_setStream": lambda **stream: None,
    "_cuda_getCurrentRawStream": lambda device: 0,
    "_cuda_isCurrentStreamCapturing": lambda: False,
    "_cuda_getArchFlags": lambda: "sm_90",
    "_cuda_getCompiledVersion": lambda: 12080,
    "_cuda_clearCublasWorkspaces": lambda: None,
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),  # imported by dynamo's reset
    "_has_cuda": True,
}
_IN_CUDA: dict[str, Any] = {
    "_initialized": True,
    "_exchange_device": _index_or_none,
    "_maybe_exchange_device": lambda device: _index_or_none(device),  # a second function: dynamo has a handler for each
    "default_generators": (_device.emulated_cuda_generator(),),
    "get_device_properties": _properties,
    "mem_get_info": _free_and_total,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "is_current_stream_capturing": lambda: False,
    "Stream": Stream,
    "Event": Event,
    "cudart": lambda: _Runtime,
}


def _run_interpreted_kernels_in_place() -> None:
    """Make Triton's interpreter run on the device's memory, without copies to the host, which would wait and count."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        def lent(value: Any) -> Any:
            return torch.ops.emulated_cuda.lent_to_cpu(value) if isinstance(value, torch.Tensor) else value

        return run(self, *map(lent, args), **{name: lent(value) for name, value in kwargs.items()})

    GridExecutor.__call__ = in_place


def _cloned(storage: Any) -> Any:
    """Return a copy of `storage`. Torch's own clone fails on CUDA if torch was built without CUDA."""
    if storage.device.type != "cuda":
        return _cloned_by_torch(storage)
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
    return copy.copy_(copy.new_empty(0).set_(storage)).untyped_storage()


_cloned_by_torch = torch.UntypedStorage.clone


def _place() -> None:
    for name, value in _IN_C.items():
        setattr(torch._C, name, value)
    for name, value in _IN_CUDA.items():
        setattr(torch.cuda, name, value)
    torch.cuda.memory.mem_get_info = _free_and_total
    torch.UntypedStorage.clone = _cloned
    if times := os.environ.get("EMULATED_CUDA_SHRINK"):
        shrink_segments(int(times))
    torch.cuda.manual_seed(torch.initial_seed())

    import emulated_arithmetic
    import emulated_attention
    import emulated_codecs

    emulated_attention.register()
    emulated_arithmetic.register()
    if os.environ.get("EMULATED_CUDA_TRITON") == "1":
        _run_interpreted_kernels_in_place()
    else:
        emulated_codecs.register()


_place()
# The device's backward thread frees Python objects after the last result. If it does so while Python exits, the thread
# is aborted. Therefore wait a little.
atexit.register(time.sleep, 0.2)
