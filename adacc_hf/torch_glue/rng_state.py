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


class PythonStates:
    """Snapshot of the states of Python's and numpy's default generators, which torch does not save."""

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = numpy.random.get_state()

    def have_advanced(self) -> bool:
        """Return True if numbers were drawn from one of the generators since the snapshot."""
        name, key, *rest = numpy.random.get_state()
        before, key_before, *rest_before = self._numpy
        is_same_numpy = (name, rest) == (before, rest_before) and numpy.array_equal(key, key_before)
        return random.getstate() != self._python or not is_same_numpy

    def restore(self) -> None:
        """Set the generators to the states of the snapshot."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)

    @contextmanager
    def temporarily_restored(self) -> Iterator[None]:
        """Set the generators to the states of the snapshot inside the `with` block.

        After the block, restore the generators' present states.
        """
        present = PythonStates()
        self.restore()
        try:
            yield
        finally:
            present.restore()


class RandomStates:
    """Snapshot of the states of all default random generators: of the CPU, of the GPUs among `devices`, of Python and
    of numpy.

    A GPU's generator keeps the seed and the offset on the host, so a snapshot does not wait for kernels. A training
    step must never wait for the device (rule R10).
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        indices = {_device_index(device) for device in devices if device.type == "cuda"}
        # Stored as bytes, because a tensor of 5 KB would count as live memory. Read by address, because torch's
        # operators on a real tensor are not available in fake mode.
        state = torch.get_rng_state()
        self._cpu = to_bytes(state)
        self._cuda = {index: torch.cuda.get_rng_state(index) for index in sorted(indices)}
        self._python = PythonStates()

    def have_advanced(self) -> bool:
        """Return True if numbers were drawn from one of the generators since the snapshot."""
        state = torch.get_rng_state()
        return (
            to_bytes(state) != self._cpu
            or any(not torch.equal(torch.cuda.get_rng_state(index), state) for index, state in self._cuda.items())
            or self._python.have_advanced()
        )

    def restore(self) -> None:
        """Set the generators to the states of the snapshot."""
        state = torch.get_rng_state()
        ctypes.memmove(state.data_ptr(), self._cpu, len(self._cpu))
        torch.set_rng_state(state)
        for index, state in self._cuda.items():
            torch.cuda.set_rng_state(state, index)
        self._python.restore()


_replacement_generators: dict[str, Any] = {}
"""Generators that are used in place of torch's default generators, by device type (`replace_generators`)."""


def generator_of(device: torch.device) -> Any:
    """Return torch's default generator of `device`, or None for devices other than CPUs and CUDA GPUs.

    Inside the `with` block of `replace_generators`, return the replacement instead.
    """
    if _replacement_generators:
        return _replacement_generators.get(device.type)
    if device.type == "cuda":
        return torch.cuda.default_generators[_device_index(device)]
    return torch.default_generator if device.type == "cpu" else None


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the default generator of `device`: 5,056 bytes for a CPU, 16 (seed, offset) for a GPU.

    The state is on the CPU for every device. Reading the state takes a microsecond and does not wait for kernels. A
    training step must never wait for the device (rule R10).
    """
    generator = generator_of(device)
    return None if generator is None else generator.get_state()


def to_bytes(state: torch.Tensor) -> bytes:
    """Return a generator's state as bytes. Unlike a tensor, bytes do not count as live memory of tensors."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def from_bytes(state: bytes | None) -> torch.Tensor | None:
    """Return a generator's state as a tensor, from the result of `to_bytes`. Return None for None."""
    return None if state is None else torch.frombuffer(bytearray(state), dtype=torch.uint8)


@contextmanager
def replace_generators(replacements: Mapping[str, Any]) -> Iterator[None]:
    """Use `replacements` in place of torch's default generators inside the `with` block.

    `replacements` contains a generator for each device type. The replacement is for fake tensors, for which no random
    numbers are drawn.
    """
    _replacement_generators.update(replacements)
    try:
        yield
    finally:
        _replacement_generators.clear()


@contextmanager
def draw_from_state(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Set the default generator of `device` to `state` inside the `with` block. After the block, restore the generator.

    If `state` is None, do nothing.
    """
    if state is None:
        yield
        return
    generator = generator_of(device)
    before = generator.clone_state()  # not get_state(), whose tensor would count as live
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before.get_state())


def gpus_in_use() -> list[torch.device]:
    """Return the GPUs visible to this process, or [] if CUDA is not initialized. This function never initializes
    CUDA."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


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
