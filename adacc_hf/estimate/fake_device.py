"""Tensors without memory that behave as on a device this machine need not have, and their live bytes.

Under `fake_tensors("cuda")` torch takes its CUDA decisions: autocast by the CUDA lists, boolean dropout masks, fused
attention. Only the choice of the attention kernel needs a GPU in torch, so it is made here by torch's rules for compute
capability 8.0 and above.
"""

from __future__ import annotations

import ctypes
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from adacc_hf.artifacts.errors import FakeDeviceError
from adacc_hf.kernels._compiler import build
from adacc_hf.torch_glue.compat import no_packed_sequences
from adacc_hf.torch_glue.memory import MemoryMeter, MemoryPoint
from adacc_hf.torch_glue.private import FakeTensorMode, TorchDispatchMode, attention_operator, storage_key, tree_leaves
from adacc_hf.torch_glue.rng_state import generators_replaced

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256
"""Widest head of the flash kernel."""
_ALIGNED = 8
"""Elements that a head's width and an attention mask's rows are padded to a multiple of for the fused kernels."""


@contextmanager
def fake_tensors(device_type: str) -> Iterator[None]:
    """While open, new tensors are fake and on `device_type`, "cpu" or "cuda".

    Raises FakeDeviceError for "cuda" where torch has no CUDA and there is no C++ compiler.
    """
    with ExitStack() as stack:
        if device_type == "cuda":
            _register_guard()
            stack.enter_context(_FusedAttention())
        stack.enter_context(no_packed_sequences())
        stack.enter_context(_FakeTensors())
        stack.enter_context(torch.device(device_type))
        stack.enter_context(generators_replaced({"cpu": _FakeCpuGenerator(), "cuda": _FakeCudaGenerator()}))
        yield


class _FakeTensors(FakeTensorMode):
    """torch's mode, which remembers the arguments of operators: a storage among them would live on and be counted."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", None) is not torch.ops.aten.set_:
            return super().dispatch(func, types, args, kwargs)
        self.cache_enabled, before = False, self.cache_enabled
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = before


class _FakeCpuGenerator:
    """Draws nothing; each state is a tensor of its own, as a CPU's is, and takes as many bytes."""

    def __init__(self) -> None:
        self._nbytes = torch.default_generator.get_state().nbytes

    def get_state(self) -> torch.Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")

    def clone_state(self) -> _FakeCpuGenerator:
        return self

    def set_state(self, state: torch.Tensor) -> None:
        """It has none."""


class _FakeCudaGenerator(_FakeCpuGenerator):
    """The same for a GPU, whose generator's state takes none of its memory."""

    def __init__(self) -> None:
        self._state = torch.empty(16, dtype=torch.uint8, device="cpu")

    def get_state(self) -> torch.Tensor:
        return self._state


@contextmanager
def fake_autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to `dtype`, if any; torch.autocast itself switches off where there is no GPU."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()  # else an autocast inside would clear the cache of casts at its end
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.clear_autocast_cache()


@cache
def _register_guard() -> None:
    """Give torch a device guard for CUDA if it was built without; with CUDA, FakeTensorMode sees to it."""
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
            f"tensors on CUDA cannot be imitated, since this torch has no CUDA and C++ could not be built: "
            f"{(getattr(error, 'stderr', None) or str(error)).strip()}. Install g++, point CXX to a compiler, or trace "
            f"as the CPU does with --trace cpu"
        ) from error


class _FusedAttention(TorchFunctionMode):
    """Calls the fused attention kernel that torch would choose on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention and args[0].device.type == "cuda":
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention as torch runs it on a GPU: flash, else memory-efficient, else single steps."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is not torch.bool:
            attn_mask = attn_mask.to(dtype)
    if attn_mask is None and query.dtype in _HALVES and query.shape[-1] <= _FLASH_HEAD_DIM:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if not enable_gqa or query.shape[1] == key.shape[1]:
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return attention_operator("math")(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    padded = [pad(t, (0, -width % _ALIGNED)) if width % _ALIGNED else t for t in (query, key, value)]
    kernel = attention_operator("flash")
    return kernel(*padded, dropout_p, is_causal, False, scale=scale)[0][..., :width]


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    if attn_mask is not None:
        attn_mask = _as_bias(attn_mask, query, key)
    kernel = attention_operator("efficient")
    wants_sums = any(tensor.requires_grad for tensor in (query, key, value))
    return kernel(query, key, value, attn_mask, wants_sums, dropout_p, is_causal, scale=scale)[0]


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What the kernel adds to the scores: floats, rows padded, one for all heads and batches if the mask is."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    length = key.shape[-2]
    if mask.shape[-1] % _ALIGNED:
        mask = pad(mask, (0, -length % _ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], length)


# Live bytes of tensors without memory, counted by their storages' lives.


class FakeMemoryMeter(MemoryMeter):
    """Counts the storages that operators make, until they die. Temporaries inside an operator are not seen."""

    def __init__(self) -> None:
        self._live_bytes = self._at_mark = self._most = 0
        self._label: tuple[Any, ...] | None = None
        self._storages: set[int] = set()
        self._mode = _WatchStorages(self)

    def __enter__(self) -> FakeMemoryMeter:
        self.points = []
        self.is_open = True
        self.mark(("start",))
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        self.is_open = False
        self._close()

    def _mark(self, label: tuple[Any, ...], dying_bytes: int) -> None:
        self._close()
        self._label = label
        # Of a storage's finalizers the meter's own, which is the oldest, runs last.
        self._at_mark = self._most = self._live_bytes - dying_bytes

    def _close(self) -> None:
        """End the stretch under way, if there is one."""
        if self._label is not None:
            self.points.append(MemoryPoint(self._label, self._at_mark, self._most))

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it dies."""
        key, nbytes = storage_key(storage), storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self._live_bytes += nbytes
        self._most = max(self._most, self._live_bytes)
        self._born(key, nbytes)
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self._live_bytes -= nbytes
        self._died(key)

    def _born(self, key: int, nbytes: int) -> None:
        """Called for each storage, by its key among those that live."""

    def _died(self, key: int) -> None:
        """Called when a storage that was counted is gone."""


class _WatchStorages(TorchDispatchMode):
    """Tells a meter of every storage that an operator makes."""

    def __init__(self, meter: FakeMemoryMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage_key(_storage(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            # What is on meta has no memory on the imitated device either.
            if storage_key(_storage(tensor)) not in given and tensor.device.type != "meta":
                self._meter.add(_storage(tensor))
        return result


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
