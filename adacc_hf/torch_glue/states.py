"""State that a call draws from or changes: random generators, and what modules hold besides their weights.

Transformers draws SpecAugment's masks from numpy, and models of users' own ask Python's dice which layer to leave out.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import nn

from adacc_hf.torch_glue.private import buffers_of


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
def drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """While open, the default generator of `device` draws from `state` on; afterwards it is as it was."""
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


# What modules hold besides their weights and change as they are called: buffers, counters, generators of their own.

LOOKS = 2
"""Calls of a block that must change nothing before it is looked at no more: a look copies its buffers, and waits."""

_SCALARS = (bool, int, float, str)


class ModuleStates:
    """The states of `modules` now: their buffers, and the plain values, tensors and generators in their attributes.

    What is in containers and objects there is left alone, and so is a tensor that is made, or made anew in another
    size, as tables are once they are needed.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        holders = [holder for module in modules for holder in (vars(module), buffers_of(module))]
        held = [(holder, name, value) for holder in holders for name, value in holder.items()]
        self._values = [each for each in held if type(each[2]) in _SCALARS or _is_plain(each[2])]
        tensors = {id(value): value for _, _, value in held if _is_plain(value)}
        self._contents = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        generators = {id(value): value for _, _, value in held if isinstance(value, torch.Generator)}
        self._states = [(generator, generator.get_state()) for generator in generators.values()]

    def without(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `tensors` whose elements are no part of these states."""
        held = {id(tensor) for tensor, _ in self._contents}
        return [tensor for tensor in tensors if id(tensor) not in held]

    def keep_changed(self) -> bool:
        """Forget what is now as it was then; returns whether anything is left."""
        self._values = [each for each in self._values if each[0].get(each[1]) is not each[2]]
        self._contents = [each for each in self._contents if not torch.equal(*each)]
        self._states = [each for each in self._states if not torch.equal(each[0].get_state(), each[1])]
        return bool(self._values or self._contents or self._states)

    def restore(self) -> None:
        """Put the modules into these states."""
        for holder, name, value in self._values:
            if _stands_for(value, holder.get(name)):
                holder[name] = value
        for tensor, content in self._contents:
            tensor.data.copy_(content)  # which autograd need not know: it comes between no forward and its backward
        for generator, state in self._states:
            generator.set_state(state)

    @contextmanager
    def back_for_a_while(self) -> Iterator[None]:
        """While open, the modules are in these states; afterwards they are as before."""
        now = ModuleStates(())
        now._values = [(holder, name, holder.get(name)) for holder, name, _ in self._values]
        now._contents = [(tensor, tensor.detach().clone()) for tensor, _ in self._contents]
        now._states = [(generator, generator.get_state()) for generator, _ in self._states]
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor whose elements can be compared and copied here."""
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta


def _stands_for(before: Any, now: Any) -> bool:
    """Whether `now` is what became of `before`, as a number or a tensor of one size does step by step."""
    if isinstance(before, torch.Tensor):
        return _is_plain(now) and (now.shape, now.dtype) == (before.shape, before.dtype)
    return type(now) is type(before)


_num_still: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Calls in a row in which a block changed nothing, `LOOKS` at the most."""


@contextmanager
def states_before(block: nn.Module | None) -> Iterator[list[ModuleStates]]:
    """A list that has, once this is left, the states before of what a call of `block` changed; empty if it is nothing.

    Nothing is looked for in a block whose first calls changed nothing: what only later ones change is not noticed.
    """
    changed: list[ModuleStates] = []
    if block is None or _num_still.get(block, 0) >= LOOKS:
        yield changed
        return
    states = ModuleStates(block.modules())
    yield changed
    if states.keep_changed():
        changed.append(states)
    _num_still[block] = 0 if changed else _num_still.get(block, 0) + 1
