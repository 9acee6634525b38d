"""Measured costs of a block: the times of its operators, and the codecs of its activations (paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors, is_accurate_enough
from adacc_hf.price.timing import Bottleneck, Timing, time_of
from adacc_hf.tape.operator_effects import moves_storage
from adacc_hf.tape.replay import ReplayStep, recorded_environment, walk
from adacc_hf.tape.tape import Tape, leaves
from adacc_hf.torch_glue.meters import MemoryMeter


@dataclass
class Prices:
    """Measured times of a block's operators, and the codecs of its activations. Equal tapes share one object."""

    operator_ms: list[float]
    operator_bytes: list[int]
    """Bytes that each operator allocates besides its results: temporaries, and Python numbers as tensors."""
    codecs: dict[int, tuple[CodecOption, ...]] = field(default_factory=dict)
    bottleneck: Bottleneck = "device_ms"
    """Resource whose times these are: the one that limits the speed of a step."""


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
    if not codecs or any(codec.stands_in for codec in codecs):
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
