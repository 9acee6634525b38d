"""Prices of a block: the time of each operator on its tape and the codecs of each activation (paper, section 3.1), or
the time of the whole call if the operators cannot be replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.artifacts.profile import WHOLE, BackwardEvent, CodecOption, ForwardEvent, KindProfile, Value
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors, gradient_errors, is_accurate_enough
from adacc_hf.price.codec_selection import codec_options, precise_codec_options
from adacc_hf.price.shared_storage import RecordedBlock, SharedTensors
from adacc_hf.price.timing import Bottleneck, Timing, bottleneck, median_ms, time_of
from adacc_hf.tape.recorder import is_freed, moves_storage
from adacc_hf.tape.replay import Environment, ReplayStep
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.memory import MemoryMeter
from adacc_hf.torch_glue.tensors import storage_of

log = logging.getLogger(__name__)


@dataclass
class Prices:
    """Prices of the first recorded block with a given tape, used for all blocks with equal tapes."""

    operator_ms: list[float]
    operator_bytes: list[int]
    """Bytes that each operator's run takes on top of its results: temporaries, and Python numbers converted to
    tensors."""
    codecs: dict[int, tuple[CodecOption, ...]] = field(default_factory=dict)
    bottleneck: Bottleneck = "device_ms"
    """The resource that limits a step, in whose time prices are measured."""


def price_tape(
    tape: Tape,
    bases: Sequence[torch.Tensor],
    config: AdaccConfig,
    outliers: dict[int, int],
    run_block: Callable[[], object] | None = None,
) -> Prices:
    """Return the prices of `tape`, measured on the recorded tensors in the time of the limiting resource, device or
    host.

    `run_block` runs the block itself, or is None if the block cannot run again.
    """
    block_host_ms = _block_host_ms(run_block, bases[0].device)
    with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
        timings = operator_timings(tape, bases)
        resource = bottleneck(timings, block_host_ms)
        codecs = codec_options(tape, bases, config, outliers, resource)
        times = [getattr(timing, resource) for timing in timings]
        return Prices(times, operator_workspaces(tape, bases), codecs, resource)


def measure_gradient_errors(
    tape: Tape, bases: Sequence[torch.Tensor], prices: Prices, config: AdaccConfig
) -> GradientErrors:
    """Return the gradient errors that codecs and replay cause in one block whose tape has these `prices`.

    If no codec is accurate enough for a value, a more precise one is priced and added to `prices`. Measuring takes
    memory on top of the recording. If that memory is not available, the errors are empty, and a warning is logged.
    """
    codecs = _lossy(prices.codecs)
    if not any(codecs.values()):
        return GradientErrors()
    try:
        with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
            errors = gradient_errors(tape, bases, codecs)
            inaccurate = [
                value for value, value_codecs in codecs.items() if _needs_precise_codec(errors, value, value_codecs)
            ]
            precise_options = precise_codec_options(tape, bases, config, inaccurate, prices.bottleneck)
            if not precise_options:
                return errors
            prices.codecs |= {value: (*prices.codecs[value], *options) for value, options in precise_options.items()}
            return gradient_errors(tape, bases, _lossy(prices.codecs))
    except torch.OutOfMemoryError:
        log.warning(
            "Adacc: not enough memory to measure how codecs change the gradients of %s: only the tracking steps of the "
            "training can detect a codec that degrades them",
            tape.block_class,
        )
        return GradientErrors()


def _lossy(options: Mapping[int, Sequence[CodecOption]]) -> dict[int, list[Codec]]:
    """Return the lossy codecs of each value, the coarsest first."""
    codecs = {}
    for value, value_options in options.items():
        lossy_options = sorted(
            (option for option in value_options if not option.lossless), key=lambda option: option.nbytes
        )
        codecs[value] = [get_codec(option.codec, **dict(option.options)) for option in lossy_options]
    return codecs


def _needs_precise_codec(errors: GradientErrors, value: int, codecs: Sequence[Codec]) -> bool:
    if not codecs or any(codec.stands_in for codec in codecs):
        return False
    return not any(is_accurate_enough(errors.codecs, value, codec.name) for codec in codecs)


def price_call(run: Callable[[], object], device: torch.device) -> Prices:
    """Return the price of a call whose tape lacks some operators. The call counts as one operator, and `run` repeats
    the call."""
    with torch.autograd.graph.saved_tensors_hooks(_drop_tensor, _refuse_backward):
        return Prices([median_ms(run, device)], [0])


def _block_host_ms(run: Callable[[], object] | None, device: torch.device) -> float | None:
    """Return the host's milliseconds for a block's forward in training, or None if the host only computes (on the
    CPU)."""
    return None if run is None or device.type != "cuda" else _host_ms_of(run, device)


def _host_ms_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the host's milliseconds for `run` with gradients enabled. Tensors saved for backward are dropped."""
    drop_saved_tensors = torch.autograd.graph.saved_tensors_hooks(_drop_tensor, _refuse_backward)
    with torch.enable_grad(), drop_saved_tensors:
        return time_of(run, device).host_ms


def _drop_tensor(_: object) -> None:
    """Drop a saved tensor of a call that has no backward."""


def _refuse_backward(_: object) -> torch.Tensor:
    raise RuntimeError("a call that is timed has no backward")


def operator_timings(tape: Tape, bases: Sequence[torch.Tensor]) -> list[Timing]:
    """Return the median times of each operator of `tape` on the recorded tensors; 0 for operators that never run again.

    If the tape is not trusted, torch's checkpoint runs all operators again. Operators that replace a recorded tensor's
    storage take negligible time, and are not run.
    """
    timings = [Timing(0.0, 0.0)] * len(tape.operators)
    for index, run in _runs(tape, bases):
        timings[index] = time_of(run, tape.values[tape.operators[index].results()[0]].device)
    return timings


def operator_workspaces(tape: Tape, bases: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes live at each operator's peak on top of its inputs and results; 0 for operators that never run
    again.

    The allocator measures them, because an operator may consist of several (a safe softmax also has masks and a second
    result).
    """
    workspaces = [0] * len(tape.operators)
    with MemoryMeter.for_device(bases[0].device) as meter:
        for index, run in _runs(tape, bases):
            meter.mark(("runs", index))
            run()
            meter.mark(("ran", index))
    for point in meter.points:
        if point.label[0] == "runs":
            index = point.label[1]
            results = sum(tape.values[value].nbytes for value in tape.operators[index].results())
            workspaces[index] = max(0, point.max_bytes - point.live_bytes - results)
    return workspaces


def _runs(tape: Tape, bases: Sequence[torch.Tensor]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield the operators that may run again, in order, each with a function that runs the operator any number of times
    before the next one."""
    is_gone = [value.overwritten or is_freed(bases[value.index], value) for value in tape.values]
    environment: Environment = [None if is_gone[value.index] else bases[value.index] for value in tape.values]
    for index, operator in enumerate(tape.operators):
        if tape.untrusted is None:
            is_ready = not tape.recomputable.isdisjoint(operator.results())
        else:
            # Skip collectives: other ranks may have cached prices already, and would not take part.
            is_local = not operator.is_collective
            is_ready = bool(operator.results()) and is_local and not moves_storage(operator)
        if not is_ready or any(environment[value] is None for value in operator.inputs()):
            continue
        step = ReplayStep(operator, tape)
        operands = {value: environment[value] for value in [*operator.inputs(), *operator.results()]}

        def run(step: ReplayStep = step, operands: dict[int, torch.Tensor | None] = operands) -> None:
            for value, tensor in operands.items():
                environment[value] = tensor
            step.run(environment)

        yield index, run
        for value, tensor in operands.items():
            # A version that a later operator overwrites was not recorded. The result of this run replaces it.
            is_overwritten = tape.values[value].overwritten and value in operator.results()
            environment[value] = environment[value] if is_overwritten else tensor


# Profile of a kind whose operators cannot be replayed, because they depend on data (rule R8) or are not recorded.
#
# Everything that such a block saves counts as one activation, which a plain run retains. Under torch's checkpoint the
# block stores all of its arguments and the state of the random generator, and runs its whole forward again.

SAVED = 0
"""Index of the one value that stands for everything the block saves."""


def untrusted_kind(group: Sequence[RecordedBlock], shared_tensors: SharedTensors, forward_ms: float) -> KindProfile:
    """Return the kind of the blocks of `group`, without the memory of its forward and backward.

    The number of tokens that an expert gets differs between blocks and between steps. The kind therefore has the most
    bytes that any of its blocks saved.
    """
    block = group[0]
    arguments = [
        _value(
            index, "an argument of the block", storage_of(tensor).nbytes(), "input", shared_tensors.record_index(tensor)
        )
        for index, tensor in enumerate(block.argument_tensors.values(), start=SAVED + 1)
    ]
    is_alone = not block.tape.has_collectives
    return KindProfile(
        digest=block.tape.kind,
        block_class=block.tape.block_class,
        values=(_saved_value(block, max(saved_bytes(each, shared_tensors) for each in group)), *arguments),
        operators=(),
        slots=(SAVED,) if block.tape.slots else (),
        forward=(),
        backward=(),
        forward_ms=forward_ms,
        given=shared_argument_records(block, shared_tensors),
        untrusted=block.tape.untrusted,
        block_actions=(BlockAction.PLAIN, BlockAction.CHECKPOINT) if is_alone else (BlockAction.CHECKPOINT,),
        generator_bytes=generator_bytes(block),
    )


def with_untrusted_forward(kind: KindProfile, forward: Sequence[ForwardEvent]) -> KindProfile:
    """Return `kind` with its measured forward. If the block saves anything, all of it counts as stored from the
    start."""
    max_extra_bytes = max(event.extra_bytes for event in forward)
    store_event = ForwardEvent(value=SAVED, death=True, extra_bytes=max_extra_bytes)
    return replace(kind, forward=(ForwardEvent(value=-1, death=False, extra_bytes=max_extra_bytes), store_event))


def with_untrusted_backward(kind: KindProfile, extra_bytes: int | None) -> KindProfile:
    """Return `kind` with its backward, in which at most `extra_bytes` were live on top of all saved bytes.

    `extra_bytes` was measured under torch's checkpoint. It also holds for a forward that saves everything, except for
    the block's result, which is as large as the largest input. A block that saved nothing when it was recorded has no
    backward, even if it has one when it is measured; `extra_bytes` may be None then.
    """
    if extra_bytes is None or not kind.slots:
        return kind
    max_extra_bytes = extra_bytes + max((value.nbytes for value in kind.values[SAVED + 1 :]), default=0)
    events = (
        BackwardEvent(slot=0, release=False, entry_bytes=extra_bytes, extra_bytes=extra_bytes),
        BackwardEvent(slot=0, release=True, entry_bytes=0, extra_bytes=0),
    )
    *first_events, last_event = kind.forward
    last_event = replace(last_event, extra_bytes=min(last_event.extra_bytes, max_extra_bytes))
    return replace(kind, forward=(*first_events, last_event), backward=events)


def saved_bytes(block: RecordedBlock, shared_tensors: SharedTensors) -> int:
    """Return the bytes that autograd saved in one call of a block and that no one else holds."""
    tape = block.tape
    own_inputs = {v for v, tensor in block.input_tensors.items() if shared_tensors.record_index(tensor) is None}
    hidden_values = block.internal_storages.keys() - block.externally_held
    own_values = [
        v for v in block.saved_values() if v in own_inputs or v in hidden_values or tape.values[v].source is None
    ]
    return sum(tape.values[v].nbytes for v in own_values)


def _saved_value(block: RecordedBlock, nbytes: int) -> Value:
    value = _value(SAVED, "all that the block saves", nbytes, WHOLE, None)
    is_saved = bool(block.tape.slots)
    return replace(value, saved=is_saved, activation=is_saved)


def _value(index: int, name: str, nbytes: int, role: str, shared: int | None) -> Value:
    return Value(
        index=index,
        name=name,
        shape=(nbytes,),
        encoded_shape=(nbytes,),
        dtype="uint8",
        nbytes=nbytes,
        producer=None,
        saved=False,
        activation=shared is None,
        shared=shared,
        recomputable=False,
        role=role,
    )


def shared_argument_records(block: RecordedBlock, shared_tensors: SharedTensors) -> tuple[int, ...]:
    """Return the records of the shared tensors among a block's arguments."""
    records = {shared_tensors.record_index(tensor) for tensor in block.argument_tensors.values()}
    return tuple(sorted(index for index in records if index is not None))


def generator_bytes(block: RecordedBlock) -> int:
    """Return the bytes of random generator state that torch's checkpoint stores on the block's device. A GPU's state is
    on the CPU."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in block.argument_tensors.values())
    return torch.get_rng_state().nbytes if on_cpu else 0
