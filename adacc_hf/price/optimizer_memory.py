"""The memory of what follows a step's last backward: gradient clipping and the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.errors import OptimizerStateError
from adacc_hf.torch_glue.memory import MemoryMeter, members_of, optimizer_tensors, tensors_beside_state, tensors_in
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.rng_state import random_states_kept
from adacc_hf.torch_glue.tensors import local_of, parts_with_memory


class OptimizerMeter(AbstractContextManager["OptimizerMeter"]):
    """Counts what `optimizer.step()` inside it allocates for a while; `nbytes` is there after leaving it.

    State that the optimizer makes in its first step and keeps is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._meter = MemoryMeter.for_device(device)

    def __enter__(self) -> OptimizerMeter:
        self._meter.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._meter.mark(("end",))
        self._meter.__exit__(None, None, None)
        kept = next(point.live_bytes for point in self._meter.points if point.label == ("end",))
        self.nbytes = max(0, self._meter.peak_bytes - kept)


def measure_optimizer_step(optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> int:
    """Clip the gradients to `max_norm`, if given, and take the optimizer's step; returns the bytes that took at most.

    For `profile_model(optimizer_step_bytes=...)`, in place of the usual two lines of one training step.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with OptimizerMeter(parameters[0].device) as meter:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return meter.nbytes


def measure_clipping(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that clipping the present gradients takes at most. Changes nothing: scaling is in place and takes none."""
    # The parts of DTensors, since their norm waits for other ranks, and the rest may be no DTensors.
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0
    with OptimizerMeter(gradients[0].device) as meter:
        norm = nn.utils.get_total_norm(gradients)
        torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        del norm
    return meter.nbytes


def coming_state_bytes(optimizer: torch.optim.Optimizer, trained: Iterable[nn.Parameter]) -> int:
    """Bytes of the state that `optimizer` has yet to make for `trained` parameters, on their device.

    All of it before the first step; later that of layers that chance left out so far (layerdrop). A copy of the
    optimizer steps on stand-ins, one of each size after the other, which takes less than the state that is coming.
    Raises OptimizerStateError if it cannot.
    """
    trained = list(trained)
    members = members_of(optimizer)
    if len(members) > 1:
        return sum(coming_state_bytes(member, trained) for member in members)
    (optimizer,) = members
    if _bare_step(optimizer) is _bare_step(torch.optim.Optimizer):
        return 0  # LOMO and AdaLomo step inside backward, and have made what they keep
    wanted = {id(parameter) for parameter in trained}
    alike: dict[Hashable, list[_StateSlot]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in wanted and not _has_state(optimizer, group, parameter):
                slot = _StateSlot(number, parameter, _override(optimizer, number, place, parameter))
                alike.setdefault(slot.size, []).append(slot)
    if not alike:
        return 0
    twin = _Twin(optimizer)
    return sum(len(slots) * twin.state_bytes(slots[0]) for slots in alike.values()) + twin.shared_bytes()


@dataclass(frozen=True)
class _StateSlot:
    """A parameter's place in an optimizer."""

    group: int
    parameter: nn.Parameter
    override: dict[str, Any]
    """What is set for this parameter alone."""

    @property
    def size(self) -> Hashable:
        """The same for parameters that have states alike."""
        one = self.parameter
        return self.group, type(one), one.shape, local_of(one).shape, one.dtype, one.device, repr(self.override)


class _Twin:
    """A copy of an optimizer that has no state, no hooks, and nothing around its step (schedulers, Accelerate)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._original = optimizer
        self._known = _storages(optimizer_tensors(optimizer)).keys()
        self._shared: dict[int, int] = {}
        self._copy: torch.optim.Optimizer = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if not callable(getattr(type(optimizer), name, None)):
                vars(self._copy)[name] = _copy_of(value)

    def state_bytes(self, slot: _StateSlot) -> int:
        """Bytes that a step makes for the parameter of `slot` alone, on its device.

        Raises OptimizerStateError if there is no such step, and torch.OutOfMemoryError.
        """
        parameter, device = slot.parameter, slot.parameter.device
        stand_in = nn.Parameter(torch.ones_like(parameter.detach()))
        self._give(slot, stand_in)
        try:
            # What torchao compiles for each size is made by the real step alone.
            with random_states_kept([device]), torch.compiler.set_stance("force_eager"):
                _bare_step(self._copy)(self._copy)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise OptimizerStateError(_unknown(self._copy, error)) from error
        self._shared |= _storages(tensors_beside_state(self._copy), device)
        made = _storages(optimizer_tensors(self._copy), device)
        own = made.keys() - self._known - self._shared.keys() - _storages([stand_in]).keys()
        nbytes = sum(made[storage] for storage in own)
        self._copy.state, self._copy.param_groups = defaultdict(dict), []
        return nbytes

    def shared_bytes(self) -> int:
        """Bytes that the steps so far made for all parameters together (the codes of bitsandbytes)."""
        return sum(nbytes for storage, nbytes in self._shared.items() if storage not in self._known)

    def _give(self, slot: _StateSlot, stand_in: nn.Parameter) -> None:
        """Have the copy step on `stand_in` alone, in place of the parameter of `slot`."""
        gradient = torch.ones_like(stand_in.detach())
        # It refuses other gradients, and its state has all elements.
        stand_in.grad = gradient.to_sparse() if isinstance(self._copy, torch.optim.SparseAdam) else gradient
        group = self._original.param_groups[slot.group]
        self._copy.param_groups = [{name: _copy_of(value) for name, value in group.items()} | {"params": [stand_in]}]
        self._copy.state = defaultdict(dict)
        begun = self._original.state.get(slot.parameter)
        if begun:  # APOLLO's seed
            self._copy.state[stand_in] = dict(begun)
        if hasattr(self._original, _MANAGER):
            manager = copy(getattr(self._original, _MANAGER))
            manager.index2config, manager.pid2config = {(0, 0): slot.override}, {}
            manager.module_weight_config_triple = []
            setattr(self._copy, _MANAGER, manager)


_MANAGER = "mng"
"""Where optimizers of bitsandbytes have what is set for single parameters."""


def _override(optimizer: torch.optim.Optimizer, group: int, place: int, parameter: nn.Parameter) -> dict[str, Any]:
    """What bitsandbytes was told of one parameter alone: the Trainer gives embeddings 32 bits."""
    manager = getattr(optimizer, _MANAGER, None)
    if manager is None:
        return {}
    for module, name, settings in manager.module_weight_config_triple:
        if getattr(module, name) is parameter:
            return dict(settings)
    return {**manager.index2config.get((group, place), {}), **manager.pid2config.get(id(parameter), {})}


def _bare_step(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of an optimizer's class without the hooks of all optimizers, which torch puts around it."""
    step: Any = (optimizer if isinstance(optimizer, type) else type(optimizer)).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _has_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> bool:
    holder = group["params"][0] if isinstance(optimizer, torch.optim.LBFGS) else parameter
    if tensors_in(list(optimizer.state.get(holder, {}).values())):
        return True
    return any(isinstance(value, dict) and parameter in value for value in group.values())  # GrokAdamW


def _unknown(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    return (
        f"optimizer={type(optimizer).__name__}(...) has yet to make its state, and how much that will be is not known: "
        f"it takes no step on stand-ins ({type(error).__name__}: {reason:.200}). Take a training step before "
        f"profile_model, or give the bytes as optimizer_state_bytes, 0 or more; without an optimizer a memory_budget "
        f"that is a fraction is kept to as well"
    )


def _copy_of(value: Any) -> Any:
    """`value`, or a copy of a container, which steps may put something into."""
    return copy(value) if isinstance(value, (dict, list, set)) else value


def _storages(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> dict[int, int]:
    """The bytes of the distinct storages of `tensors`, of those on `device` if it is given."""
    here = [tensor for tensor in tensors if device is None or tensor.device == device]
    storages = [part.untyped_storage() for tensor in here for part in parts_with_memory(tensor)]
    return {storage_key(storage): storage.nbytes() for storage in storages}
