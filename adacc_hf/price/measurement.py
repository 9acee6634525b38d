"""Measurement of the times and the memory in a profile, in real runs on the device (paper, section 3.1).

A subclass estimates the readings for a model on fake tensors (estimate/fake_measurement.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.kernels._host_payloads import encoding_of
from adacc_hf.kernels.codecs import PRECISE, Codec, get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors, gradient_errors, is_accurate_enough
from adacc_hf.price.codec_selection import codec_options, count_outlier_channels, precise_codec_options
from adacc_hf.price.host_copies import measure_host_link
from adacc_hf.price.timing import Bottleneck, Timing, bottleneck, median_ms, seconds_at, time_of
from adacc_hf.tape.operator_effects import RngUse, moves_storage
from adacc_hf.tape.replay import ReplayStep, recorded_environment, walk
from adacc_hf.tape.replay_check import verify
from adacc_hf.tape.tape import Tape, leaves
from adacc_hf.torch_glue.memory import (
    allocate_workspaces,
    available_bytes,
    backward,
    count_static_bytes,
    distinct_bytes,
    optimizer_tensors,
    static_bytes,
)
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.rng_state import RandomStates

log = logging.getLogger(__name__)


@dataclass
class Prices:
    """Measured times of a block's operators, and the codecs of its activations. Equal tapes share one object."""

    operator_ms: list[float]
    operator_bytes: list[int]
    """Bytes that each operator allocates besides its results: temporaries, and Python numbers as tensors."""
    codecs: dict[int, tuple[CodecOption, ...]] = field(default_factory=dict)
    bottleneck: Bottleneck = "device_ms"
    """Resource whose times these are: the one that limits the speed of a step."""


class Measurement:
    """Source of all times, bytes and errors in a profile, measured in real runs."""

    rng_use: type[RngUse] = RngUse
    head_shares: tuple[int, ...] = (4, 8)
    """Whole logits may not fit the budget, so heads are measured on these shares of the rows."""

    def verify(self, tape: Tape, bases: list[torch.Tensor]) -> frozenset[int]:
        """Return the values of `tape` whose replay gives the original bits. Replay recomputes no others (rule R7)."""
        return verify(tape, bases)

    def outliers(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
        """Return the number of outlier channels of each activation for which a codec stores outliers separately."""
        return count_outlier_channels(tape, bases, config)

    def price(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig, outliers: dict[int, int]) -> Prices:
        """Measure the time of each operator of `tape`, and the costs of the codecs for each activation, on the recorded
        tensors `bases`. The times are the device's or the host's, whichever limits the speed of a step."""
        with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
            timings = operator_timings(tape, bases)
            resource = bottleneck(timings)
            codecs = codec_options(tape, bases, config, outliers, resource)
            times = [getattr(timing, resource) for timing in timings]
            return Prices(times, operator_workspaces(tape, bases), codecs, resource)

    def gradient_errors(
        self, tape: Tape, bases: list[torch.Tensor], prices: Prices, config: AdaccConfig
    ) -> GradientErrors:
        """Measure the gradient errors that codecs and replay cause in the block recorded on `tape`.

        If no codec in `prices` is accurate enough for a value, a more precise codec is added to `prices`. If there is
        not enough memory, the errors are empty, and a warning is logged.
        """
        codecs = lossy_codecs(prices.codecs)
        if not any(codecs.values()):
            return GradientErrors()
        try:
            with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
                errors = gradient_errors(tape, bases, codecs)
                inaccurate = [value for value in codecs if needs_precise_codec(errors, value, codecs[value])]
                precise_options = precise_codec_options(tape, bases, config, inaccurate, prices.bottleneck)
                if not precise_options:
                    return errors
                prices.codecs |= {v: (*prices.codecs[v], *options) for v, options in precise_options.items()}
                return gradient_errors(tape, bases, lossy_codecs(prices.codecs))
        except torch.OutOfMemoryError:
            log.warning(
                "Adacc: not enough memory to measure how codecs change the gradients of %s: only the tracking steps of "
                "the training can detect a codec that degrades them",
                tape.block_class,
            )
            return GradientErrors()

    def meter(self, device: torch.device) -> MemoryMeter:
        """Return a meter of live bytes on `device`."""
        return MemoryMeter.for_device(device)

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        """Call `call` in backward once the gradient of `tensor` is complete."""

        def hook(_: torch.Tensor) -> None:
            call()

        tensor.register_hook(hook)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from `loss`."""
        backward(loss)

    def clock(self) -> AbstractContextManager[Any]:
        """Return a context around the code that `seconds_at` times."""
        return nullcontext()

    def seconds_at(self, device: torch.device) -> float:
        """Return the clock's time in seconds once `device` has finished all of its work."""
        return seconds_at(device)

    def head_ms(self, loss: LossCall, compute: Callable[[LossCall], torch.Tensor]) -> float:
        """Return the milliseconds of forward and backward of `compute(loss)`, a model's output layer and loss: the
        median of HEAD_REPEATS runs after a warm-up."""
        return median_ms(lambda: _head_gradients(loss, compute), loss.rows.device, HEAD_REPEATS)

    def static_bytes(self, model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> int:
        """Return the bytes live on the model's device before a step."""
        allocate_workspaces(next(model.parameters()).device)
        return static_bytes(model, batch, optimizer)

    def available_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        """Return the bytes that this process uses or can use on the model's device, at the time of the call."""
        return available_bytes(next(model.parameters()).device, count_static_bytes(model, {}, optimizer))

    def host_link(self, device: torch.device, config: AdaccConfig, model: nn.Module) -> tuple[HostLink | None, int]:
        """Return (cost of copies to and from host memory, free bytes of host memory for payloads of `model`), or (None,
        0) if payloads must stay on the device."""
        return measure_host_link(device, config, model)

    def random_states(self, devices: Iterable[torch.device]) -> RandomStates:
        """Return the states of the random generators of `devices` and of the CPU."""
        return RandomStates(devices)


HEAD_REPEATS = 3
"""Number of timed runs of a head, so that one interruption does not decide which head is faster."""


def _head_gradients(loss: LossCall, compute: Callable[[LossCall], Tensor]) -> tuple[Tensor, ...]:
    """Compute the loss and return the gradients of detached inputs and parameters of the output layer."""
    detached_loss = loss.detached()
    with torch.enable_grad():
        value = compute(detached_loss)
    leaves = (detached_loss.rows, detached_loss.call.weight, detached_loss.call.bias)
    return torch.autograd.grad(value, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad])


def full_logits_loss(loss: LossCall) -> Tensor:
    """Compute the loss from full logits, to time the plain head."""
    dtype, bias = loss.call.dtype, loss.call.bias
    with torch.autocast(loss.rows.device.type, enabled=False):
        logits = F.linear(loss.rows.to(dtype), loss.call.weight.to(dtype), None if bias is None else bias.to(dtype))
        return F.cross_entropy(logits.float(), loss.target, ignore_index=loss.ignore_index, reduction=loss.reduction)


PRICED_HEADS = {"plain": full_logits_loss, "chunked": LossCall.chunked}
"""Functions that compute the loss with each head (plain or chunked), by the head's name."""


# Codecs whose gradient errors are measured, and operators that are timed.


def lossy_codecs(options: Mapping[int, Sequence[CodecOption]]) -> dict[int, list[Codec]]:
    """Return the lossy codecs among `options`, the smallest payload first."""
    codecs = {}
    for value, value_options in options.items():
        lossy_options = sorted(
            (option for option in value_options if not option.lossless), key=lambda option: option.nbytes
        )
        codecs[value] = [get_codec(option.codec, **dict(option.options)) for option in lossy_options]
    return codecs


def needs_precise_codec(errors: GradientErrors, value: int, codecs: Sequence[Codec]) -> bool:
    """Return True if each of `codecs` is too coarse for `value`."""
    if not codecs or PRECISE in [encoding_of(codec.name) for codec in codecs]:
        return False
    return not any(is_accurate_enough(errors.codecs, value, codec.name) for codec in codecs)


def operator_timings(tape: Tape, bases: Sequence[torch.Tensor]) -> list[Timing]:
    """Return the median times of each operator of `tape`, run on the recorded tensors `bases`.

    Operators that never run again in training get 0. If the tape cannot be replayed, torch's checkpoint may run all of
    them again. Operators that replace a tensor's storage take negligible time, and are not run.
    """
    timings = [Timing(0.0, 0.0)] * len(tape.operators)
    for index, run in _timed_operators(tape, bases):
        timings[index] = time_of(run, tape.values[tape.operators[index].results()[0]].device)
    return timings


def operator_workspaces(tape: Tape, bases: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes that each operator allocates at its peak besides inputs and results, as the allocator counts
    them. Operators that never run again in training get 0."""
    workspaces = [0] * len(tape.operators)
    with MemoryMeter.for_device(bases[0].device) as meter:
        for index, run in _timed_operators(tape, bases):
            meter.mark(("runs", index))
            run()
            meter.mark(("ran", index))
    for point in meter.points:
        if point.label[0] == "runs":
            index = point.label[1]
            results = sum(tape.values[value].nbytes for value in tape.operators[index].results())
            workspaces[index] = max(0, point.max_bytes - point.live_bytes - results)
    return workspaces


def _timed_operators(tape: Tape, bases: Sequence[torch.Tensor]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield (index, function that runs the operator, any number of times) for each operator to time."""
    environment = recorded_environment(tape, bases)
    for operator in walk(tape, environment):
        if tape.untrusted is None:
            is_ready = not tape.recomputable.isdisjoint(operator.results())
        else:
            # Skip collectives: other ranks may have cached prices already, and would not take part. Skip draws from the
            # user's own generators, which would advance.
            arguments = leaves(operator.args, operator.kwargs)
            has_effects = operator.is_collective or any(isinstance(leaf, torch.Generator) for leaf in arguments)
            is_ready = bool(operator.results()) and not has_effects and not moves_storage(operator)
        if not is_ready or any(environment[value] is None for value in operator.inputs()):
            continue
        step = ReplayStep(operator, tape)
        operands = {value: environment[value] for value in operator.inputs()}
        for value in operator.results():  # a replayed one is computed again
            operands[value] = environment[value] = bases[value] if environment[value] is bases[value] else None

        def run(step: ReplayStep = step, operands: dict[int, torch.Tensor | None] = operands) -> None:
            for value, tensor in operands.items():
                environment[value] = tensor
            step.run(environment)

        yield operator.index, run
        for value, tensor in operands.items():
            environment[value] = environment[value] if tensor is None else tensor


class OptimizerMeter(AbstractContextManager["OptimizerMeter"]):
    """Context that measures the temporary bytes of an `optimizer.step()`, without the optimizer's state."""

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


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the bytes of the tensors that `optimizer` holds on `device` in addition to the model's parameters."""
    return distinct_bytes([tensor for tensor in optimizer_tensors(optimizer) if tensor.device == device])
