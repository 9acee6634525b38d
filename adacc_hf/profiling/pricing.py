"""Prices of a tape: the time of each operator and, for each activation, of each codec that suits it (paper, section
3.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from adacc_hf.config import AdaccConfig
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.kernels.outlier_int4 import count_outliers
from adacc_hf.memory import MemoryMeter
from adacc_hf.profile import CodecOption
from adacc_hf.profiling.divisors import divisors
from adacc_hf.profiling.timing import Bottleneck, Timing, bottleneck, median_ms, time_of
from adacc_hf.tapes.compiled import encode_view
from adacc_hf.tapes.recorder import MOVES_STORAGE, is_freed
from adacc_hf.tapes.replay import Environment, Step, view
from adacc_hf.tapes.tape import Tape, TapeOperator, TensorRef, tensor_refs

_ATTENTION = ("scaled_dot_product", "bmm", "baddbmm")
_BIAS = ("attn_mask", "attn_bias", "bias")
"""What fused attention calls the argument that it adds to its scores."""
_MATMUL = ("mm", "addmm", "linear")
_NORM = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
_EXPONENTS = ("log_softmax", "logsumexp", "cos", "sin")
"""Backward raises e to what these read or give, or takes its angle: an error there is no longer a relative one."""
_ACTIVATION = ("gelu", "silu", "relu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "mish", "pow")

SUMMARY_RATIO = 8
"""What has a dimension less than what it is made of and this many times fewer elements saves little by codecs, and each
of its elements decides about many."""
OUTLIER_SHARE = 0.01
"""Share of the channels that are taken to be outliers where there is no data to count them in."""

CODEC_OF_ROLE = {
    "linear": "outlier_int4",
    "norm": "outlier_int4",
    "activation": "outlier_int4",
    "other": "outlier_int4",
    "qkv": "channel_int4",
    "softmax": "asymmetric_int4",
    "input": "int8",
    "mask": "bitmask",
}
"""The paper's layer-specific choice (section 3.2). A block input reaches every gradient of its block, so it gets 8
bits."""


@dataclass
class Prices:
    """What the first block of a tape cost."""

    operator_ms: list[float]
    operator_bytes: list[int]
    """What a run of each operator takes besides its results: temporaries, and Python numbers made tensors."""
    codecs: dict[int, tuple[CodecOption, ...]] = field(default_factory=dict)


def price_tape(tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, outliers: dict[int, int]) -> Prices:
    """The prices of `tape`, measured on the recorded tensors: the time of what its steps wait for, device or host."""
    with torch.no_grad(), torch.autocast(bases[0].device.type, enabled=False):
        timings = operator_timings(tape, bases)
        scarce = bottleneck(timings)
        coded = storable(tape) if tape.untrusted is None else []
        codecs = {v: codec_options(tape, v, bases[v], config, outliers.get(v, 0), scarce) for v in coded}
        times = [getattr(timing, scarce) for timing in timings]
        return Prices(times, operator_workspaces(tape, bases), codecs)


def price_call(run: Callable[[], object], device: torch.device) -> Prices:
    """The prices of a call whose operators are not all on its tape: it counts as one, and `run` makes it again."""
    with torch.autograd.graph.saved_tensors_hooks(_keep_nothing, _keep_nothing):
        return Prices([median_ms(run, device)], [0])


def _keep_nothing(_: object) -> None:
    """For saved tensors of a call that has no backward."""


def storable(tape: Tape) -> list[int]:
    """Values that a policy may act on: what the block saves and made, and its inputs; none if it runs as a whole."""
    if tape.untrusted is not None:
        return []
    saved = [v for v in tape.saved_values() if tape.values[v].source is None]
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    return sorted({*saved, *inputs})


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
            ready = bool(operator.made()) and is_own and operator.target._schema.name not in MOVES_STORAGE
        if not ready or any(environment[value] is None for value in operator.inputs()):
            continue
        step = Step(operator, tape)
        kept = {value: environment[value] for value in [*operator.inputs(), *operator.made()]}

        def run(step: Step = step, kept: dict[int, torch.Tensor | None] = kept) -> None:
            for value, tensor in kept.items():
                environment[value] = tensor
            step.run(environment)

        yield index, run
        for value, tensor in kept.items():
            # A version that a later operator overwrites was not recorded: what the run made stands for it.
            overwritten = tape.values[value].overwritten and value in operator.made()
            environment[value] = environment[value] if overwritten else tensor


def role_of(tape: Tape, value: int) -> str:
    """The class of tensor that a value is, from the operators that make and read it.

    A key of CODEC_OF_ROLE, or "parameter" for parameters and what is made of them alone.
    """
    record = tape.values[value]
    if is_parameter_cast(tape, value):
        return "parameter"
    if tape.is_block_input(value):
        return "input"
    if record.ref.dtype is torch.bool or _is_drawn(tape, value):
        return "mask"
    if _is_softmax(tape, value):
        return "softmax"
    readers = [tape.operators[index] for index in tape.consumers(value)]
    names = [reader.target._opname.strip("_") for reader in readers]
    if any(
        name.startswith(_ATTENTION) and _is_attention(tape, reader) for name, reader in zip(names, readers, strict=True)
    ):
        return "qkv"
    makers = [tape.operators[record.producer].target._opname.strip("_")] if record.producer is not None else []
    for role, family in (("norm", _NORM), ("linear", _MATMUL), ("activation", _ACTIVATION)):
        if any(name.startswith(family) for name in names + makers * (role == "activation")):
            return role
    return "other"


def _is_drawn(tape: Tape, value: int) -> bool:
    """Whether a value is a random draw, perhaps scaled: dropout's mask."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if operator.random:
        return True
    scaled = operator.target._opname.strip("_") in ("div", "mul") and len(operator.inputs()) == 1
    return scaled and _is_drawn(tape, operator.inputs()[0])


def _is_softmax(tape: Tape, value: int) -> bool:
    """Whether a value is a softmax, or one with dropout's mask on it (the paper's score)."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    name = operator.target._opname.strip("_")
    if "softmax" in name:
        return True
    thinned = name in ("mul", "native_dropout_backward", "clone", "to_copy")
    return thinned and any(_is_softmax(tape, read) for read in operator.inputs())


def _is_attention(tape: Tape, operator: TapeOperator) -> bool:
    """Whether a product is between activations, not with a parameter."""
    return not any(tape.is_module_state(value) for value in operator.inputs())


def candidates(tape: Tape, value: int, config: AdaccConfig) -> list[str]:
    """Names of the codecs that `value` may be compressed with."""
    record = tape.values[value]
    role = role_of(tape, value)
    if record.nbytes < config.min_compress_bytes or not record.is_encodable or role == "parameter":
        return []
    if role == "mask" and config.codecs is None:
        return ["bitmask"]
    if "compress" not in config.actions or _is_summary(tape, value) or _is_exponent(tape, value):
        return []
    if _is_attention_bias(tape, value) or value in divisors(tape):
        return []
    if config.codecs is None:
        # With a bound on errors, what INT4 is too coarse for may still do with INT8.
        return list(dict.fromkeys([CODEC_OF_ROLE[role], *(["int8"] if config.max_error is not None else [])]))
    return [name for name in config.codecs if (name == "bitmask") == (role == "mask")]


def _is_summary(tape: Tape, value: int) -> bool:
    record = tape.values[value]
    operator = None if record.producer is None else tape.operators[record.producer]
    reads = [] if operator is None else [ref.geometry[0] for ref in tensor_refs((operator.args, operator.kwargs))]
    return is_summary(record.ref.geometry[0], reads[0] if reads else ())


def is_summary(size: Sequence[int], source: Sequence[int]) -> bool:
    """Whether a value of this size has a few numbers for each row of what its operator reads first: a mean, a norm, the
    logarithms that attention sums up, padded perhaps.

    What a product or an index leaves of its operand has as many dimensions, however few its columns or rows.
    """
    if tuple(size[-1:]) == (1,):
        return True
    return len(size) < len(source) and math.prod(size) * SUMMARY_RATIO <= math.prod(source)


def _is_exponent(tape: Tape, value: int) -> bool:
    """Whether backward takes an exponential or an angle of a value."""
    producer = tape.values[value].producer
    nearby = [*tape.consumers(value), *([] if producer is None else [producer])]
    return any(tape.operators[index].target._opname.strip("_").startswith(_EXPONENTS) for index in nearby)


def _is_attention_bias(tape: Tape, value: int) -> bool:
    """Whether fused attention adds a value to its scores: a mask, whose -inf no scale takes, or a bias of positions."""
    readers = [tape.operators[index] for index in tape.consumers(value)]
    added = [attention_bias(reader.target, reader.args, reader.kwargs) for reader in readers]
    return any(isinstance(ref, TensorRef) and ref.value == value for ref in added)


def attention_bias(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator that is fused attention adds to its scores; None for other operators, and where it adds none."""
    schema = getattr(target, "_schema", None)
    if schema is None or "attention" not in schema.name:
        return None
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    return next((given[name] for name in _BIAS if given.get(name) is not None), None)


def is_parameter_cast(tape: Tape, value: int) -> bool:
    """Whether a value is made of parameters alone (a cast by autocast, a transposed copy): never compressed (rule
    R4)."""
    producer = tape.values[value].producer
    if producer is None:
        return tape.is_module_state(value)
    inputs = tape.operators[producer].inputs()
    return bool(inputs) and all(is_parameter_cast(tape, read) for read in inputs)


def outliers_in(tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
    """Outlier channels (paper, equation 1) of each activation that would be compressed with `outlier_int4`."""
    if not config.outliers or tape.untrusted is not None:
        return {}
    wanted = [value for value in tape.saved_values() if "outlier_int4" in candidates(tape, value, config)]
    return {v: count_outliers(view(bases[v], encode_view(tape, v)), config.zscore_threshold) for v in wanted}


def make_codec(name: str, config: AdaccConfig, num_outliers: int) -> Codec:
    """The codec `name` with the options that `config` sets for it."""
    if name == "outlier_int4":
        return get_codec(
            name, group_size=config.group_size, num_outliers=num_outliers, zscore_threshold=config.zscore_threshold
        )
    if name in ("asymmetric_int4", "int8"):
        return get_codec(name, group_size=config.group_size)
    return get_codec(name)


def assumed_outliers(channels: int, config: AdaccConfig, share: float = OUTLIER_SHARE) -> int:
    """Outliers among `channels` where there is no data to count them in."""
    return math.ceil(share * channels) if config.outliers else 0


def codec_options(
    tape: Tape, value: int, base: torch.Tensor, config: AdaccConfig, num_outliers: int, scarce: Bottleneck
) -> tuple[CodecOption, ...]:
    """The codecs for one activation, priced on its recorded tensor in the time that is scarce."""
    tensor = view(base, encode_view(tape, value))
    options = []
    for name in candidates(tape, value, config):
        codec = make_codec(name, config, num_outliers)
        if codec.supports(tuple(tensor.shape), tensor.dtype) and codec.accepts(tensor):
            options.append(_price(codec, tensor, scarce))
    return tuple(options)


def with_outliers(
    options: tuple[CodecOption, ...], tape: Tape, value: int, config: AdaccConfig, num_outliers: int
) -> tuple[CodecOption, ...]:
    """`options` with the outlier codec keeping `num_outliers` channels, as many as the neediest block of a kind has."""
    size, ref = encode_view(tape, value).geometry[0], tape.values[value].ref
    codecs = [make_codec(option.codec, config, num_outliers) for option in options]
    return tuple(
        replace(option, options=tuple(sorted(codec.options.items())), nbytes=codec.predicted_bytes(size, ref.dtype))
        for option, codec in zip(options, codecs, strict=True)
    )


def _price(codec: Codec, tensor: torch.Tensor, scarce: Bottleneck) -> CodecOption:
    codec.fit(tensor)
    payload = codec.encode(tensor)
    return CodecOption(
        codec=codec.name,
        options=tuple(sorted(codec.options.items())),
        nbytes=codec.predicted_bytes(tuple(tensor.shape), tensor.dtype),
        encode_ms=getattr(time_of(lambda: codec.encode(tensor), tensor.device), scarce),
        decode_ms=getattr(time_of(lambda: codec.decode(payload), tensor.device), scarce),
        error=0.0 if codec.lossless else relative_error(tensor, codec.decode(payload)),
        lossless=codec.lossless,
    )


def relative_error(original: torch.Tensor, decoded: torch.Tensor) -> float:
    """L2 norm of the difference over that of the original, in double precision; 0 for an all-zero original."""
    norm = original.double().norm()
    return float((decoded.double() - original.double()).norm() / norm) if norm > 0 else 0.0
