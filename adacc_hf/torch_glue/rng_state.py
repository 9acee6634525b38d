"""States of random generators: torch's, and those of Python and numpy, which models draw from too.

Transformers draws SpecAugment's masks from numpy, and models of users' own ask Python's dice which layer to leave out.
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
    """The states of Python's and numpy's default generators now, of which torch keeps no account."""

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = numpy.random.get_state()

    def have_moved(self) -> bool:
        """Whether somebody has drawn from one of them since."""
        name, key, *rest = numpy.random.get_state()
        before, key_before, *rest_before = self._numpy
        is_same_numpy = (name, rest) == (before, rest_before) and numpy.array_equal(key, key_before)
        return random.getstate() != self._python or not is_same_numpy

    def restore(self) -> None:
        """Put the generators into these states."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)

    @contextmanager
    def back_for_a_while(self) -> Iterator[None]:
        """While open, what is drawn is what was drawn from these states on; afterwards the generators are as before."""
        now = PythonStates()
        self.restore()
        try:
            yield
        finally:
            now.restore()


class RandomStates:
    """The states of all default generators now: the CPU's, those of the GPUs among `devices`, Python's and numpy's.

    A GPU's generator keeps its seed and offset on the host: to read them waits for no kernel (rule R10).
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        indices = {_index(device) for device in devices if device.type == "cuda"}
        # As bytes: a tensor of 5 KB would be live, and counted, for as long as this is held. By address, since tensors
        # without memory let no operator of torch look at a real one.
        state = torch.get_rng_state()
        self._cpu = ctypes.string_at(state.data_ptr(), state.numel())
        self._cuda = {index: torch.cuda.get_rng_state(index) for index in sorted(indices)}
        self._python = PythonStates()

    def have_moved(self) -> bool:
        """Return True if somebody has drawn from one of them since."""
        state = torch.get_rng_state()
        return (
            ctypes.string_at(state.data_ptr(), state.numel()) != self._cpu
            or any(not torch.equal(torch.cuda.get_rng_state(index), state) for index, state in self._cuda.items())
            or self._python.have_moved()
        )

    def restore(self) -> None:
        """Put the generators into these states."""
        state = torch.get_rng_state()
        ctypes.memmove(state.data_ptr(), self._cpu, len(self._cpu))
        torch.set_rng_state(state)
        for index, state in self._cuda.items():
            torch.cuda.set_rng_state(state, index)
        self._python.restore()


_in_their_place: dict[str, Any] = {}
"""By type of device, what stands for its default generators."""


def generator_of(device: torch.device) -> Any:
    """The default generator of `device`; None for devices other than CPUs and GPUs, whose states are not ours to put
    back."""
    if _in_their_place:
        return _in_their_place.get(device.type)
    if device.type == "cuda":
        return torch.cuda.default_generators[_index(device)]
    return torch.default_generator if device.type == "cpu" else None


def generator_state(device: torch.device) -> torch.Tensor | None:
    """The state of the default generator of `device`: 5,056 bytes of a CPU's, a GPU's seed and offset in 16.

    It lies on the CPU, whatever the device, and to read it waits for no kernel (rule R10): it takes a microsecond.
    """
    generator = generator_of(device)
    return None if generator is None else generator.get_state()


@contextmanager
def generators_replaced(by: Mapping[str, Any]) -> Iterator[None]:
    """While open, `by` has what stands for the default generators, by type of device: tensors without memory draw
    nothing."""
    _in_their_place.update(by)
    try:
        yield
    finally:
        _in_their_place.clear()


@contextmanager
def drawing_from(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """While open, the default generator of `device` draws from `state` on; afterwards it is as it was.

    If `state` is None, leave the generator alone.
    """
    if state is None:
        yield
        return
    generator = generator_of(device)
    before = generator.clone_state()  # no tensor, which would be live beside what is drawn
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before.get_state())


def gpus_in_use() -> list[torch.device]:
    """The GPUs that this process may draw random numbers on; none is woken up by asking."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@contextmanager
def random_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """While open, whoever draws random numbers does so for itself: afterwards the generators are as they were."""
    before = RandomStates(devices)
    try:
        yield
    finally:
        before.restore()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
