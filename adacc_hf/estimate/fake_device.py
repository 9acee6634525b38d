"""Fake tensors (tensors without memory) on a device that need not be present, and a meter of their live bytes.

Under `fake_tensors("cuda")` torch behaves as on a GPU: autocast by the lists for CUDA, boolean dropout masks, fused
attention. Torch itself chooses the attention kernel only if a GPU is present. Therefore this module chooses the kernel,
by torch's rules for compute capability 8.0 and above.
"""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from adacc_hf.artifacts.errors import FakeDeviceError
from adacc_hf.estimate.fake_backward import fake_gradients
from adacc_hf.kernels._compiler import build
from adacc_hf.tape.tiled_rows import gradients_by
from adacc_hf.torch_glue.compat import no_packed_sequences
from adacc_hf.torch_glue.dynamo_gaps import more_operators
from adacc_hf.torch_glue.meters import MemoryMeter, MemoryPoint
from adacc_hf.torch_glue.private import FakeTensorMode, TorchDispatchMode, attention_operator, storage_key
from adacc_hf.torch_glue.rng_state import replace_generators

DEVICE_QUERY = torch.ops.prim.device.default
"""Operator by which torch queries the device of each fake tensor, more often than it computes."""
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
"""Largest size of an attention head that the flash kernel supports."""
_ALIGNMENT = 8
"""Unit of padding for the fused kernels: head sizes and rows of attention masks are padded to a multiple of this number
of elements."""


@contextmanager
def fake_tensors(device_type: str) -> Iterator[None]:
    """Make new tensors inside the `with` block fake tensors on `device_type`, "cpu" or "cuda".

    Raises FakeDeviceError for "cuda" if torch was built without CUDA and there is no C++ compiler.
    """
    with ExitStack() as stack:
        if device_type == "cuda":
            _register_guard()
            stack.enter_context(_FusedAttention())
            stack.enter_context(_compute_capability((8, 0)))
        stack.enter_context(no_packed_sequences())
        stack.enter_context(more_operators())
        stack.enter_context(_FakeTensors())
        stack.enter_context(torch.device(device_type))
        stack.enter_context(gradients_by(fake_gradients))
        stack.enter_context(replace_generators({"cpu": _FakeCpuGenerator(), "cuda": _FakeCudaGenerator()}))
        yield


@contextmanager
def _compute_capability(capability: tuple[int, int]) -> Iterator[None]:
    """Make torch report `capability` as the GPU's compute capability inside the `with` block. Transformers'
    mixture-of-experts layers, for example, read the capability."""
    original = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original


class _FakeTensors(FakeTensorMode):
    """Torch's fake tensor mode, without the mode's cache for calls of `aten.set_`.

    The cache keeps the arguments of operators. The storage passed to `aten.set_` would therefore stay alive, and would
    be counted as live.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", None) is not torch.ops.aten.set_:
            return super().dispatch(func, types, args, kwargs)
        self.cache_enabled, was_enabled = False, self.cache_enabled
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = was_enabled


class _FakeCpuGenerator:
    """Replacement for the CPU's random number generator under fake tensors.

    Each state that is read is a new tensor of the real state's size.
    """

    def __init__(self) -> None:
        self._nbytes = torch.default_generator.get_state().nbytes

    def get_state(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def clone_state(self) -> _FakeCpuGenerator:
        return self

    def set_state(self, state: torch.Tensor) -> None:
        """Ignore `state`, because a fake generator has no state."""


class _FakeCudaGenerator(_FakeCpuGenerator):
    """Replacement for a GPU's random number generator under fake tensors.

    The generator's state is in host memory, and does not count as GPU memory.
    """

    def __init__(self) -> None:
        self._state = torch.empty(16, dtype=torch.uint8, device="cpu")

    def get_state(self) -> torch.Tensor:
        return self._state


@contextmanager
def fake_autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enable autocast to `dtype` inside the `with` block, or disable autocast if `dtype` is None.

    If there is no GPU, torch.autocast disables itself for "cuda". Therefore the autocast state is set directly.
    """
    was_enabled, previous_dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()  # without this, a nested autocast would clear the cache of casts at its end
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(device_type, was_enabled)
        torch.set_autocast_dtype(device_type, previous_dtype)
        torch.clear_autocast_cache()


@cache
def _register_guard() -> None:
    """Register a CUDA device guard that does nothing, if torch was built without CUDA. If torch was built with CUDA,
    FakeTensorMode handles guards."""
    if torch.backends.cuda.is_built():
        return
    torch_folder = Path(torch.__file__).parent
    flags = (
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wl,--no-as-needed",
        f"-I{torch_folder / 'include'}",
        f"-L{torch_folder / 'lib'}",
    )
    try:
        library = build(Path(__file__).with_name("_cuda_guard.cpp"), (*flags, "-lc10"), [torch.__version__])
        ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise FakeDeviceError(
            f"fake CUDA tensors need a C++ extension, because this torch is built without CUDA, and its compilation "
            f"failed: {(getattr(error, 'stderr', None) or str(error)).strip()}. Install g++, set CXX to a compiler, or "
            f"trace the CPU's operators with --trace cpu"
        ) from error


class _FusedAttention(TorchFunctionMode):
    """Function mode that calls the fused attention kernel that torch would choose on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention and args[0].device.type == "cuda":
            return _gpu_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the attention kernel that torch chooses on a GPU: flash, else memory-efficient, else unfused."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is not torch.bool:
            attn_mask = attn_mask.to(dtype)
    width = query.shape[-1]
    if attn_mask is None and query.dtype in _HALVES and width <= _FLASH_HEAD_DIM:
        padded = [pad(t, (0, -width % _ALIGNMENT)) if width % _ALIGNMENT else t for t in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        return attention_operator("flash")(*padded, dropout_p, is_causal, False, scale=scale)[0][..., :width]
    if not enable_gqa or query.shape[1] == key.shape[1]:
        bias = None if attn_mask is None else _bias_from_mask(attn_mask, query, key)
        needs_log_sum_exp = any(tensor.requires_grad for tensor in (query, key, value))
        kernel = attention_operator("efficient")
        return kernel(query, key, value, bias, needs_log_sum_exp, dropout_p, is_causal, scale=scale)[0]
    return attention_operator("math")(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias_from_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Convert an attention mask to the bias that the kernel adds to the scores: floats, with padded rows. A mask that
    heads or sequences share is expanded, not copied. Rows are padded to a multiple of _ALIGNMENT elements."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    length = key.shape[-2]
    if mask.shape[-1] % _ALIGNMENT:
        mask = pad(mask, (0, -length % _ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], length)


# Live bytes of fake tensors, counted from the lifetimes of their storages.


class FakeMemoryMeter(MemoryMeter):
    """Meter of the live bytes of fake tensors' storages. An operator's internal temporaries are not counted.

    Inside the `with` block of another meter, this meter's peaks stand still, as a `CpuMemoryMeter`'s do.
    """

    _open: ClassVar[list[FakeMemoryMeter]] = []
    """Meters whose `with` blocks are open, the innermost last."""

    def __init__(self, on_mark: Callable[[tuple[Any, ...]], None] = lambda label: None) -> None:
        self._on_mark = on_mark
        self._live_bytes = self._bytes_at_mark = self._peak_bytes = 0
        self._label: tuple[Any, ...] | None = None
        self._storages: set[int] = set()
        self._mode = _StorageObserver(self)

    def __enter__(self) -> FakeMemoryMeter:
        self.points = []
        self.is_open = True
        self.mark(("start",))
        self._open.append(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        self.is_open = False
        self._close()
        self._open.remove(self)
        for outer in self._open[-1:]:
            outer._peak_bytes = max(outer._peak_bytes, outer._live_bytes)

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._close()
        self._on_mark(label)
        self._label = label
        # `dying_bytes` are still counted: a storage's finalizers run newest first, and the meter's is the oldest.
        self._bytes_at_mark = self._peak_bytes = self._live_bytes - dying_bytes

    def _close(self) -> None:
        """Append a memory point for the last mark, unless no mark was set yet. The point contains the mark's label, the
        live bytes at the mark, and the peak of the live bytes since the mark."""
        if self._label is not None:
            self.points.append(MemoryPoint(self._label, self._bytes_at_mark, self._peak_bytes))

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a new storage until the storage is freed."""
        key, nbytes = storage_key(storage), storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self._live_bytes += nbytes
        if self in self._open[-1:]:
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._remove, key, nbytes).atexit = False

    def has(self, key: int) -> bool:
        """Return True if the storage with this `storage_key` is live and counted."""
        return key in self._storages

    def _remove(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self._live_bytes -= nbytes


class _StorageObserver(TorchDispatchMode):
    """Dispatch mode that adds every storage that an operator allocates to a meter."""

    def __init__(self, meter: FakeMemoryMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_QUERY:
            return args[0].device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:  # which has the storage of an input
            return result
        input_keys: set[int] | None = None
        for tensor in _operator_tensors((result,)):
            # Tensors on meta take no memory on a real device either.
            if tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if self._meter.has(key):
                continue
            if input_keys is None:
                inputs = (*_operator_tensors(args), *_operator_tensors(tuple(kwargs.values())))
                input_keys = {storage_key(each.untyped_storage()) for each in inputs}
            if key not in input_keys:
                self._meter.add(storage)
        return result


def _operator_tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _operator_tensors(tuple(argument))
