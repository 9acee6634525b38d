"""The random generators that training draws from: torch's, and those of Python and numpy.

Transformers draws SpecAugment's masks from numpy, and models of users' own ask Python's dice which layer to leave out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


class RandomStates:
    """The states of all default generators now: the CPU's, those of the GPUs among `devices`, Python's and numpy's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        indices = {_index(device) for device in devices if device.type == "cuda"}
        self._cpu = torch.get_rng_state()
        self._cuda = {index: torch.cuda.get_rng_state(index) for index in sorted(indices)}
        self._python: Any = random.getstate()
        self._numpy: Any = numpy.random.get_state()

    def restore(self) -> None:
        """Put the generators into these states."""
        torch.set_rng_state(self._cpu)
        for index, state in self._cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


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
