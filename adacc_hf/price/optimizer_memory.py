"""Measurement of the memory of gradient clipping and of the optimizer's step, after a step's last backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.errors import OptimizerStateError
from adacc_hf.torch_glue.memory import (
    MemoryMeter,
    component_optimizers,
    optimizer_attribute_tensors,
    optimizer_tensors,
    tensors_in,
)
from adacc_hf.torch_glue.private import storage_key
from adacc_hf.torch_glue.rng_state import preserve_random_states
from adacc_hf.torch_glue.tensors import local_of, parts_with_memory


class OptimizerMeter(AbstractContextManager["OptimizerMeter"]):
    """Context that measures the temporary bytes of an `optimizer.step()`. `nbytes` is set on exit.

    State that the optimizer creates in its first step and keeps is not counted.
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
        end_bytes = next(point.live_bytes for point in self._meter.points if point.label == ("end",))
        self.nbytes = max(0, self._meter.peak_bytes - end_bytes)


def measure_optimizer_step(optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> int:
    """Clip the gradients to `max_norm`, if given, and take the optimizer's step. Return the peak of temporary bytes.

    In one training step, call this function in place of clipping and `optimizer.step()`. Pass the result to
    `profile_model(optimizer_step_bytes=...)`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with OptimizerMeter(parameters[0].device) as meter:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return meter.nbytes


def measure_clipping(parameters: Iterable[nn.Parameter]) -> int:
    """Compute the norm of the present gradients, as clipping does, and return the peak of temporary bytes.

    No gradient is scaled, because scaling works in place and takes no memory.
    """
    # Use local parts of DTensors: a DTensor's norm waits for other ranks, and other gradients may be plain tensors.
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0
    with OptimizerMeter(gradients[0].device) as meter:
        norm = nn.utils.get_total_norm(gradients)
        torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        del norm
    return meter.nbytes


def coming_state_bytes(
    optimizer: torch.optim.Optimizer, trained: Iterable[nn.Parameter], known: dict[Hashable, int] | None = None
) -> int:
    """Return the bytes of state that `optimizer` has yet to create for the `trained` parameters, on their device.

    Before the first step, the whole state is missing. Later, only the state of parameters that no step has trained so
    far is missing, for example in layers that layerdrop has skipped.

    To measure the state, a copy of the optimizer takes a step on one stand-in tensor for each size of parameter. The
    stand-ins come one after the other, so that this takes less memory than the missing state. Raises
    OptimizerStateError if the copy cannot step.

    `known` is a dict that keeps the results, so that later calls with the same dict do not repeat the steps for the
    same parameters. Use it only as long as the optimizer's settings do not change.
    """
    trained = list(trained)
    members = component_optimizers(optimizer)
    if len(members) > 1:
        return sum(coming_state_bytes(member, trained, known) for member in members)
    (optimizer,) = members
    if _bare_step(optimizer) is _bare_step(torch.optim.Optimizer):
        return 0  # LOMO and AdaLomo step inside backward, and already have their state
    trained_ids = {id(parameter) for parameter in trained}
    slots_by_size: dict[Hashable, list[_StateSlot]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in trained_ids and not _has_optimizer_state(optimizer, group, parameter):
                slot = _StateSlot(number, parameter, _parameter_settings(optimizer, number, place, parameter))
                slots_by_size.setdefault(slot.size, []).append(slot)
    if not slots_by_size:
        return 0
    known = {} if known is None else known
    key = id(optimizer), tuple((size, *(id(slot.parameter) for slot in slots)) for size, slots in slots_by_size.items())
    if key not in known:
        known[key] = _measure_state(optimizer, slots_by_size)
    return known[key]


def _measure_state(optimizer: torch.optim.Optimizer, slots_by_size: Mapping[Hashable, Sequence[_StateSlot]]) -> int:
    """Return the bytes of state that `optimizer` creates in a step for the parameters in `slots_by_size`."""
    optimizer_copy = _OptimizerCopy(optimizer)
    return (
        sum(len(slots) * optimizer_copy.state_bytes(slots[0]) for slots in slots_by_size.values())
        + optimizer_copy.shared_bytes()
    )


@dataclass(frozen=True)
class _StateSlot:
    """One parameter of an optimizer, with the index of its group and with its own settings."""

    group: int
    parameter: nn.Parameter
    override: dict[str, Any]
    """Settings of the optimizer that apply to this parameter alone."""

    @property
    def size(self) -> Hashable:
        """Key that is equal for parameters whose optimizer states have the same size."""
        parameter = self.parameter
        return (
            self.group,
            type(parameter),
            parameter.shape,
            local_of(parameter).shape,
            parameter.dtype,
            parameter.device,
            repr(self.override),
        )


class _OptimizerCopy:
    """Copy of an optimizer that lacks its state, its hooks, and wrappers around its step (schedulers, Accelerate)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._original = optimizer
        self._known_storages = _bytes_by_storage(optimizer_tensors(optimizer)).keys()
        self._shared_storages: dict[int, int] = {}
        self._copy: torch.optim.Optimizer = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if not callable(getattr(type(optimizer), name, None)):
                vars(self._copy)[name] = _shallow_copy(value)

    def state_bytes(self, slot: _StateSlot) -> int:
        """Return the bytes of state that a step allocates on a parameter's device if the optimizer has only this
        parameter.

        `slot` describes the parameter. Raises torch.OutOfMemoryError if memory runs out, and OptimizerStateError if the
        step fails for another reason.
        """
        parameter, device = slot.parameter, slot.parameter.device
        stand_in = nn.Parameter(torch.ones_like(parameter.detach()))
        self._set_parameter(slot, stand_in)
        try:
            # Run eagerly: torchao compiles a step per size, which only the real step should do.
            with preserve_random_states([device]), torch.compiler.set_stance("force_eager"):
                _bare_step(self._copy)(self._copy)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise OptimizerStateError(_unpredictable_state(self._copy, error)) from error
        self._shared_storages |= _bytes_by_storage(optimizer_attribute_tensors(self._copy), device)
        state_storages = _bytes_by_storage(optimizer_tensors(self._copy), device)
        own_storages = (
            state_storages.keys()
            - self._known_storages
            - self._shared_storages.keys()
            - _bytes_by_storage([stand_in]).keys()
        )
        nbytes = sum(state_storages[storage] for storage in own_storages)
        self._copy.state, self._copy.param_groups = defaultdict(dict), []
        return nbytes

    def shared_bytes(self) -> int:
        """Return the bytes of state that the copy's steps allocated once for all parameters, such as bitsandbytes'
        codes."""
        return sum(nbytes for storage, nbytes in self._shared_storages.items() if storage not in self._known_storages)

    def _set_parameter(self, slot: _StateSlot, stand_in: nn.Parameter) -> None:
        """Prepare the optimizer's copy for a step on `stand_in`, a new tensor of the size and dtype of a parameter.

        `slot` describes the parameter. `stand_in` gets a gradient of ones, and the parameter's settings and existing
        state. During the step, the copy has no other parameters.
        """
        gradient = torch.ones_like(stand_in.detach())
        # SparseAdam accepts only sparse gradients, and its state has all elements.
        stand_in.grad = gradient.to_sparse() if isinstance(self._copy, torch.optim.SparseAdam) else gradient
        group = self._original.param_groups[slot.group]
        self._copy.param_groups = [
            {name: _shallow_copy(value) for name, value in group.items()} | {"params": [stand_in]}
        ]
        self._copy.state = defaultdict(dict)
        existing_state = self._original.state.get(slot.parameter)
        if existing_state:  # such as APOLLO's seed
            self._copy.state[stand_in] = dict(existing_state)
        if hasattr(self._original, _MANAGER):
            manager = copy(getattr(self._original, _MANAGER))
            manager.index2config, manager.pid2config = {(0, 0): slot.override}, {}
            manager.module_weight_config_triple = []
            setattr(self._copy, _MANAGER, manager)


_MANAGER = "mng"
"""Name of the attribute in which bitsandbytes optimizers keep the settings of single parameters."""


def _parameter_settings(
    optimizer: torch.optim.Optimizer, group: int, place: int, parameter: nn.Parameter
) -> dict[str, Any]:
    """Return the settings that a bitsandbytes optimizer has for one parameter, such as the Trainer's 32 bits for
    embeddings."""
    manager = getattr(optimizer, _MANAGER, None)
    if manager is None:
        return {}
    for module, name, settings in manager.module_weight_config_triple:
        if getattr(module, name) is parameter:
            return dict(settings)
    return {**manager.index2config.get((group, place), {}), **manager.pid2config.get(id(parameter), {})}


def _bare_step(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> Callable[..., Any]:
    step: Any = (optimizer if isinstance(optimizer, type) else type(optimizer)).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _has_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> bool:
    holder = group["params"][0] if isinstance(optimizer, torch.optim.LBFGS) else parameter
    if tensors_in(list(optimizer.state.get(holder, {}).values())):
        return True
    return any(isinstance(value, dict) and parameter in value for value in group.values())  # GrokAdamW


def _unpredictable_state(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0]
    return (
        f"optimizer={type(optimizer).__name__}(...) has not created all of its state, whose size cannot be "
        f"predicted: a step on stand-in parameters failed ({type(error).__name__}: {reason:.200}). Take a training "
        f"step before profile_model, or pass the state's bytes as optimizer_state_bytes, 0 or more. A memory_budget "
        f"that is a fraction can also be met without passing an optimizer"
    )


def _shallow_copy(value: Any) -> Any:
    """Return a shallow copy of `value` if it is a container, because the measured step may change it. Otherwise return
    `value`."""
    return copy(value) if isinstance(value, (dict, list, set)) else value


def _bytes_by_storage(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> dict[int, int]:
    device_tensors = [tensor for tensor in tensors if device is None or tensor.device == device]
    storages = [part.untyped_storage() for tensor in device_tensors for part in parts_with_memory(tensor)]
    return {storage_key(storage): storage.nbytes() for storage in storages}
