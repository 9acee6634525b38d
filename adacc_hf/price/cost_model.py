"""Prices of a tape: operators, and codecs for each activation (paper, section 3.1); or of a block without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import BlockAction
from adacc_hf.artifacts.profile import WHOLE, BackwardEvent, CodecOption, ForwardEvent, KindProfile, Value
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.price.codec_gradient_error import GradientErrors, gradient_errors, is_near
from adacc_hf.price.codec_selection import codec_options, finer_options
from adacc_hf.price.shared_storage import RecordedBlock, Sharing
from adacc_hf.price.timing import Bottleneck, Timing, bottleneck, median_ms, time_of
from adacc_hf.tape.recorder import is_freed, moves_storage
from adacc_hf.tape.replay import Environment, ReplayStep
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.memory import MemoryMeter
from adacc_hf.torch_glue.tensors import storage_of

log = logging.getLogger(__name__)


@dataclass
class Prices:
    """What the first block of a tape cost."""

    operator_ms: list[float]
    operator_bytes: list[int]
    """What a run of each operator takes besides its results: temporaries, and Python numbers made tensors."""
    codecs: dict[int, tuple[CodecOption, ...]] = field(default_factory=dict)
    scarce: Bottleneck = "device_ms"
    """What a step waits for."""


def price_tape(
    tape: Tape,
    bases: Sequence[torch.Tensor],
    config: AdaccConfig,
    outliers: dict[int, int],
    run_block: Callable[[], object] | None = None,
) -> Prices:
    """The prices of `tape`, measured on the recorded tensors: the time of what its steps wait for, device or host.

    `run_block` runs the block itself; None where it cannot be run again.
    """
    block_host_ms = _block_host_ms(run_block, bases[0].device)
    with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
        timings = operator_timings(tape, bases)
        scarce = bottleneck(timings, block_host_ms)
        codecs = codec_options(tape, bases, config, outliers, scarce)
        times = [getattr(timing, scarce) for timing in timings]
        return Prices(times, operator_workspaces(tape, bases), codecs, scarce)


def errors_of(tape: Tape, bases: Sequence[torch.Tensor], prices: Prices, config: AdaccConfig) -> GradientErrors:
    """What codecs and replay do to the gradients of one block whose tape has these `prices`.

    Where no codec is near enough, a finer one is priced too. It takes memory beside what was recorded: none is measured
    where that is not there, and a warning says so.
    """
    codecs = _lossy(prices.codecs)
    if not any(codecs.values()):
        return GradientErrors()
    try:
        with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
            errors = gradient_errors(tape, bases, codecs)
            missing = [value for value, some in codecs.items() if _needs_finer(errors, value, some)]
            finer = finer_options(tape, bases, config, missing, prices.scarce)
            if not finer:
                return errors
            prices.codecs |= {value: (*prices.codecs[value], *options) for value, options in finer.items()}
            return gradient_errors(tape, bases, _lossy(prices.codecs))
    except torch.OutOfMemoryError:
        log.warning(
            "Adacc: no memory to try codecs on the gradients of %s: only tracking steps will tell if one degrades them",
            tape.block_class,
        )
        return GradientErrors()


def _lossy(options: Mapping[int, Sequence[CodecOption]]) -> dict[int, list[Codec]]:
    """The codecs that lose something, the coarsest first."""
    found = {}
    for value, some in options.items():
        lossy = sorted((option for option in some if not option.lossless), key=lambda option: option.nbytes)
        found[value] = [get_codec(option.codec, **dict(option.options)) for option in lossy]
    return found


def _needs_finer(errors: GradientErrors, value: int, codecs: Sequence[Codec]) -> bool:
    if not codecs or any(codec.stands_in for codec in codecs):
        return False
    return not any(is_near(errors.codecs, value, codec.name) for codec in codecs)


def price_call(run: Callable[[], object], device: torch.device) -> Prices:
    """The prices of a call whose operators are not all on its tape: it counts as one, and `run` makes it again."""
    with torch.autograd.graph.saved_tensors_hooks(_keep_nothing, _refuse_backward):
        return Prices([median_ms(run, device)], [0])


def _block_host_ms(run: Callable[[], object] | None, device: torch.device) -> float | None:
    """How long the host takes for a block's forward in training; None where it does nothing but the computing."""
    return None if run is None or device.type != "cuda" else _host_ms_of(run, device)


def _host_ms_of(run: Callable[[], object], device: torch.device) -> float:
    """How long the host takes for `run` with gradients on. Nothing that is saved for backward is kept."""
    keep_nothing = torch.autograd.graph.saved_tensors_hooks(_keep_nothing, _refuse_backward)
    with torch.enable_grad(), keep_nothing:
        return time_of(run, device).host_ms


def _keep_nothing(_: object) -> None:
    """For saved tensors of a call that has no backward."""


def _refuse_backward(_: object) -> torch.Tensor:
    raise RuntimeError("a call that is timed has no backward")


def operator_timings(tape: Tape, bases: Sequence[torch.Tensor]) -> list[Timing]:
    """Medians of each operator of `tape` on the recorded tensors; 0 for those that never run again.

    Of a tape that is not trusted torch's checkpoint runs them all again. What would put another storage under a
    recorded tensor takes no time to speak of, and is not tried.
    """
    timings = [Timing(0.0, 0.0)] * len(tape.operators)
    for index, run in _runs(tape, bases):
        timings[index] = time_of(run, tape.values[tape.operators[index].made()[0]].device)
    return timings


def operator_workspaces(tape: Tape, bases: Sequence[torch.Tensor]) -> list[int]:
    """Bytes live at the peak of each operator's run besides its inputs and results; 0 for those that never run again.

    The allocator tells, since an operator may be made of many (a safe softmax also has masks and a second result).
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
            results = sum(tape.values[value].nbytes for value in tape.operators[index].made())
            workspaces[index] = max(0, point.max_bytes - point.live_bytes - results)
    return workspaces


def _runs(tape: Tape, bases: Sequence[torch.Tensor]) -> Iterator[tuple[int, Callable[[], None]]]:
    """The operators that may run again, in order, each with what runs it, as often as one likes before the next."""
    gone = [value.overwritten or is_freed(bases[value.index], value) for value in tape.values]
    environment: Environment = [None if gone[value.index] else bases[value.index] for value in tape.values]
    for index, operator in enumerate(tape.operators):
        if tape.untrusted is None:
            ready = not tape.recomputable.isdisjoint(operator.made())
        else:
            # Collectives are left out: the other ranks may know the prices already, and would not take part.
            is_own = not operator.is_collective
            ready = bool(operator.made()) and is_own and not moves_storage(operator)
        if not ready or any(environment[value] is None for value in operator.inputs()):
            continue
        step = ReplayStep(operator, tape)
        kept = {value: environment[value] for value in [*operator.inputs(), *operator.made()]}

        def run(step: ReplayStep = step, kept: dict[int, torch.Tensor | None] = kept) -> None:
            for value, tensor in kept.items():
                environment[value] = tensor
            step.run(environment)

        yield index, run
        for value, tensor in kept.items():
            # A version that a later operator overwrites was not recorded: what the run made stands for it.
            overwritten = tape.values[value].overwritten and value in operator.made()
            environment[value] = environment[value] if overwritten else tensor


# The profile of a kind whose operators cannot be replayed, since they depend on data (rule R8), or are not seen.
#
# All that such a block saves is one activation, which a block that runs plainly retains. Under torch's checkpoint it
# keeps all of the block's arguments and the state of the random generator, and runs the whole forward once more.

SAVED = 0
"""The index of all that the block saves."""


def untrusted_kind(group: Sequence[RecordedBlock], sharing: Sharing, forward_ms: float) -> KindProfile:
    """The kind of the blocks of `group`, its memory still to be measured.

    How many tokens an expert gets differs from block to block and from step to step: it has the most that any saved.
    """
    block = group[0]
    arguments = [
        _value(index, "an argument of the block", storage_of(tensor).nbytes(), "input", sharing.index_of(tensor))
        for index, tensor in enumerate(block.given.values(), start=SAVED + 1)
    ]
    is_alone = not block.tape.has_collectives
    return KindProfile(
        digest=block.tape.kind,
        block_class=block.tape.block_class,
        values=(_saved_value(block, max(saved_bytes(each, sharing) for each in group)), *arguments),
        operators=(),
        slots=(SAVED,) if block.tape.slots else (),
        forward=(),
        backward=(),
        forward_ms=forward_ms,
        given=given_records(block, sharing),
        untrusted=block.tape.untrusted,
        block_actions=(BlockAction.PLAIN, BlockAction.CHECKPOINT) if is_alone else (BlockAction.CHECKPOINT,),
        generator_bytes=generator_bytes(block),
    )


def with_untrusted_forward(kind: KindProfile, forward: Sequence[ForwardEvent]) -> KindProfile:
    """`kind` with its measured forward, in which it counts as storing everything from the start, if it does."""
    most = max(event.extra_bytes for event in forward)
    stored = ForwardEvent(value=SAVED, death=True, extra_bytes=most)
    return replace(kind, forward=(ForwardEvent(value=-1, death=False, extra_bytes=most), stored))


def with_untrusted_backward(kind: KindProfile, besides: int | None) -> KindProfile:
    """`kind` with its backward, in which at most `besides` bytes were live on top of all that it saved.

    That was measured under torch's checkpoint, so that it holds for a forward that saves everything too, but for the
    block's result, which is as large as the largest input. A block that had nothing to save when it was recorded has no
    backward, whatever it did when it was measured; `besides` may be None then.
    """
    if besides is None or not kind.slots:
        return kind
    most = besides + max((value.nbytes for value in kind.values[SAVED + 1 :]), default=0)
    events = (
        BackwardEvent(slot=0, release=False, entry_bytes=besides, extra_bytes=besides),
        BackwardEvent(slot=0, release=True, entry_bytes=0, extra_bytes=0),
    )
    *begin, stored = kind.forward
    stored = replace(stored, extra_bytes=min(stored.extra_bytes, most))
    return replace(kind, forward=(*begin, stored), backward=events)


def saved_bytes(block: RecordedBlock, sharing: Sharing) -> int:
    """Return the bytes of all that autograd saved of one call of a block, and that nothing else holds."""
    tape = block.tape
    own_inputs = {v for v, tensor in block.arguments.items() if sharing.index_of(tensor) is None}
    hidden = block.made.keys() - block.held_besides
    own = [v for v in block.saved() if v in own_inputs or v in hidden or tape.values[v].source is None]
    return sum(tape.values[v].nbytes for v in own)


def _saved_value(block: RecordedBlock, nbytes: int) -> Value:
    whole = _value(SAVED, "all that the block saves", nbytes, WHOLE, None)
    is_saved = bool(block.tape.slots)
    return replace(whole, saved=is_saved, activation=is_saved)


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


def given_records(block: RecordedBlock, sharing: Sharing) -> tuple[int, ...]:
    """Return the records of the shared tensors that a block is given."""
    found = {sharing.index_of(tensor) for tensor in block.given.values()}
    return tuple(sorted(index for index in found if index is not None))


def generator_bytes(block: RecordedBlock) -> int:
    """What torch's checkpoint keeps on the block's device; a GPU's state is kept on the CPU."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in block.given.values())
    return torch.get_rng_state().nbytes if on_cpu else 0
