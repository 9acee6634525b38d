"""Live bytes of tensors without memory, counted by their storages' lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adacc_hf.memory import MemoryMeter, MemoryPoint


class FakeMemoryMeter(MemoryMeter):
    """Counts the storages that operators make, until they die. Temporaries inside an operator are not seen."""

    def __init__(self, price_ms: Callable[..., float] | None = None) -> None:
        """`price_ms(func, args, kwargs, result)` is the time of an operator, if times are to be summed too."""
        self.total_ms = 0.0
        self.price_ms = price_ms
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
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self._live_bytes += nbytes
        self._most = max(self._most, self._live_bytes)
        weakref.finalize(storage, self._forget, key, nbytes).atexit = False

    def _forget(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self._live_bytes -= nbytes


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
        if self._meter.price_ms is not None:
            self._meter.total_ms += self._meter.price_ms(func, args, kwargs, result)
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf)._cdata not in given:
                self._meter.add(_storage(leaf))
        return result


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
