"""States of the random generators of torch, Python and numpy.

Models use all these generators: Transformers draws SpecAugment's masks from numpy, and some models choose layers to
skip with Python's generator.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch


class RandomStates:
    """Snapshot of the states of the default generators of Python and numpy, which torch does not save.

    If `devices` are given, the snapshot also contains the generators of the CPU and of the GPUs among `devices`. A
    GPU's generator keeps the seed and the offset on the host, so a snapshot does not wait for kernels (rule R10).
    """

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = numpy.random.get_state()
        gpus = sorted({_device_index(device) for device in devices or () if device.type == "cuda"})
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]
        # Copies of the generators, because a tensor with a CPU's state of 5 KB would count as live memory.
        self._torch = [(each, each.clone_state()) for each in generators if devices is not None]

    def have_advanced(self) -> bool:
        """Return True if numbers were drawn from one of the generators since the snapshot."""
        name, key, *rest = numpy.random.get_state()
        before, key_before, *rest_before = self._numpy
        is_same_numpy = (name, rest) == (before, rest_before) and numpy.array_equal(key, key_before)
        return (
            random.getstate() != self._python
            or not is_same_numpy
            or any(to_bytes(now.get_state()) != to_bytes(before.get_state()) for now, before in self._torch)
        )

    def restore(self) -> None:
        """Set the generators to the states of the snapshot."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        for generator, before in self._torch:
            generator.set_state(before.get_state())

    @contextmanager
    def temporarily_restored(self) -> Iterator[None]:
        """Set Python's and numpy's generators to the states of the snapshot inside the `with` block, and restore their
        present states afterwards. Not for a snapshot with `devices`, whose present states would be lost."""
        present = RandomStates()
        self.restore()
        try:
            yield
        finally:
            present.restore()


_replacement_generators: dict[str, Any] = {}
"""Generators that are used in place of torch's default generators, by device type (`replace_generators`)."""


def _generator_of(device: torch.device) -> Any:
    """Return the default generator of `device` or its replacement. Return None for other devices than CPUs and GPUs."""
    if _replacement_generators:
        return _replacement_generators.get(device.type)
    if device.type == "cuda":
        return torch.cuda.default_generators[_device_index(device)]
    return torch.default_generator if device.type == "cpu" else None


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the default generator of `device`, a tensor on the CPU: 5,056 bytes for a CPU, 16 (seed,
    offset) for a GPU. Reading the state does not wait for kernels (rule R10)."""
    generator = _generator_of(device)
    return None if generator is None else generator.get_state()


def to_bytes(state: torch.Tensor) -> bytes:
    """Return a generator's state as bytes. Unlike a tensor, bytes do not count as live memory of tensors."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def from_bytes(state: bytes | None) -> torch.Tensor | None:
    """Return a generator's state as a tensor, from the result of `to_bytes`. Return None for None."""
    return None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)


@contextmanager
def replace_generators(replacements: Mapping[str, Any]) -> Iterator[None]:
    """Use `replacements`, one generator for each device type, in place of torch's default generators inside the `with`
    block, for fake tensors."""
    _replacement_generators.update(replacements)
    try:
        yield
    finally:
        _replacement_generators.clear()


@contextmanager
def draw_from_state(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Set the default generator of `device` to `state` inside the `with` block, and restore the generator afterwards.
    If `state` is None, do nothing."""
    if state is None:
        yield
        return
    generator = _generator_of(device)
    before = generator.clone_state()  # not get_state(), whose tensor would count as live
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before.get_state())


def gpus_in_use() -> list[torch.device]:
    """Return the GPUs visible to this process, or [] if CUDA is not initialized. Never initialize CUDA."""
    indices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.device("cuda", index) for index in indices]


@contextmanager
def preserve_random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the default generators of the CPU, the GPUs among `devices`, Python and numpy after the `with` block."""
    before = RandomStates(devices)
    try:
        yield
    finally:
        before.restore()


def _device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
