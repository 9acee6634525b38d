"""The codecs that suit the role of each activation (paper, section 3.2), priced on its recorded tensor, and the values
that no lossy codec suits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.exact_recompute_rules import is_statistic
from adacc_hf.artifacts.profile import CodecOption
from adacc_hf.kernels.codecs import MASK, Codec, codec_type, codecs_suiting, get_codec, precise_codec, replacements
from adacc_hf.price.timing import Bottleneck, time_of
from adacc_hf.tape.execution_plan import encode_view
from adacc_hf.tape.replay import view
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, tensor_refs
from adacc_hf.torch_glue.private import OpOverload, schema_of
from adacc_hf.torch_glue.tensors import relative_error

OUTLIER_SHARE = 0.01
"""Share of the channels that are taken to be outliers where there is no data to count them in."""


def storable(tape: Tape) -> list[int]:
    """Values that a policy may act on: what the block saves and made, and its inputs; none if it runs as a whole."""
    if tape.untrusted is not None:
        return []
    saved = [v for v in tape.saved_values() if tape.values[v].source is None]
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    return sorted({*saved, *inputs})


def candidates(tape: Tape, config: AdaccConfig) -> dict[int, list[str]]:
    """Names of the codecs that each of the `storable` values may be compressed with."""
    degraded = precision_sensitive_values(tape)
    return {value: _codec_names(tape, value, config, value in degraded) for value in storable(tape)}


def _codec_names(tape: Tape, value: int, config: AdaccConfig, is_degraded: bool) -> list[str]:
    record, role = tape.values[value], role_of(tape, value)
    if record.nbytes < config.min_compress_bytes or not record.is_encodable or role == "parameter":
        return []
    is_lossless = role == MASK and config.codecs is None
    if not is_lossless and ("compress" not in config.actions or is_degraded):
        return []
    return codecs_of_role(role, config)


def outliers_in(tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
    """Outlier channels (paper, equation 1) of each activation that a codec would keep them of."""
    if not config.outliers:
        return {}
    return {
        value: codec.count_outliers(view(bases[value], encode_view(tape, value)), config.zscore_threshold)
        for value, codec in with_outlier_codec(tape, config).items()
    }


def with_outlier_codec(tape: Tape, config: AdaccConfig) -> dict[int, Codec]:
    """Activations that may be compressed with a codec that keeps outliers, and that codec."""
    return {
        value: make_codec(name, config, 0)
        for value, names in candidates(tape, config).items()
        for name in names
        if codec_type(name).keeps_outliers
    }


def make_codec(name: str, config: AdaccConfig, num_outliers: int) -> Codec:
    """The codec `name` with the options that `config` sets for it."""
    codec_class = codec_type(name)
    options = {option: getattr(config, option) for option in codec_class.settings}
    return get_codec(name, **options, **({"num_outliers": num_outliers} if codec_class.keeps_outliers else {}))


def assumed_outliers(channels: int, config: AdaccConfig, share: float = OUTLIER_SHARE) -> int:
    """Outliers among `channels` where there is no data to count them in."""
    return math.ceil(share * channels) if config.outliers else 0


def codec_options(
    tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, outliers: Mapping[int, int], scarce: Bottleneck
) -> dict[int, tuple[CodecOption, ...]]:
    """The codecs for each of the `storable` values, priced on its recorded tensor in the time that is scarce."""
    found = {}
    for value, names in candidates(tape, config).items():
        tensor = view(bases[value], encode_view(tape, value))
        codecs = [make_codec(name, config, outliers.get(value, 0)) for name in names]
        suited = [c for c in codecs if c.supports(tuple(tensor.shape), tensor.dtype) and c.accepts(tensor)]
        if config.codecs is None:
            suited = [_more_exact(codec, role_of(tape, value), tensor, config) for codec in suited]
        found[value] = tuple(_price(codec, tensor, scarce) for codec in suited)
    return found


def _more_exact(codec: Codec, role: str, tensor: torch.Tensor, config: AdaccConfig) -> Codec:
    """Return `codec`, or the codec that replaces it on tensors of `role` if that one is more exact on `tensor`."""
    others = [make_codec(name, config, 0) for name in replacements(codec.name, role)]
    others = [other for other in others if other.supports(tuple(tensor.shape), tensor.dtype)]
    if not others:
        return codec
    return min([codec, *others], key=lambda candidate: _round_trip_error(candidate, tensor))


def finer_options(
    tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, values: Sequence[int], scarce: Bottleneck
) -> dict[int, tuple[CodecOption, ...]]:
    """The precise codec, priced for those of `values` that it takes, where the settings leave the choice to us."""
    found: dict[int, tuple[CodecOption, ...]] = {}
    for value in values if config.codecs is None else ():
        tensor, codec = view(bases[value], encode_view(tape, value)), make_codec(precise_codec(), config, 0)
        if codec.supports(tuple(tensor.shape), tensor.dtype):
            found[value] = (_price(codec, tensor, scarce),)
    return found


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
        error=0.0 if codec.lossless else float(relative_error([tensor], [codec.decode(payload)])),
        lossless=codec.lossless,
    )


def _round_trip_error(codec: Codec, tensor: torch.Tensor) -> float:
    return float(relative_error([tensor], [codec.decode(codec.encode(tensor))]))


# Roles: the class of tensor that a value is, which decides which codec suits it (paper, section 3.2).

_ATTENTION = ("scaled_dot_product", "bmm", "baddbmm")
_MATMUL = ("mm", "addmm", "linear")
_NORM = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
_ACTIVATION = ("gelu", "silu", "relu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "mish", "pow")


def role_of(tape: Tape, value: int) -> str:
    """The class of tensor that a value is, from the operators that make and read it.

    One of ROLES, or "parameter" for parameters and what is made of them alone, "generator" for a generator's state.
    """
    record = tape.values[value]
    if is_parameter_cast(tape, value):
        return "parameter"
    if tape.is_block_input(value):
        return "input"
    if tape.is_generator_state(value):
        return "generator"
    if record.ref.dtype is torch.bool or _is_drawn(tape, value):
        return MASK
    if _is_softmax(tape, value):
        return "softmax"
    readers = [tape.operators[index] for index in tape.consumers(value)]
    if any(reader.short_name.startswith(_ATTENTION) and _is_attention(tape, reader) for reader in readers):
        return "qkv"
    names = [reader.short_name for reader in readers]
    makers = [tape.operators[record.producer].short_name] if record.producer is not None else []
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
        return not operator.is_attention
    scaled = operator.short_name in ("div", "mul") and len(operator.inputs()) == 1
    return scaled and _is_drawn(tape, operator.inputs()[0])


def _is_softmax(tape: Tape, value: int) -> bool:
    """Whether a value is a softmax, or one with dropout's mask on it (the paper's score)."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if "softmax" in operator.short_name:
        return True
    thinned = operator.short_name in ("mul", "native_dropout_backward", "clone", "to_copy")
    return thinned and any(_is_softmax(tape, read) for read in operator.inputs())


def _is_attention(tape: Tape, operator: TapeOperator) -> bool:
    """Whether a product is between activations, not with a parameter."""
    return not any(tape.is_module_state(value) for value in operator.inputs())


def codecs_of_role(role: str, config: AdaccConfig) -> list[str]:
    """Names of the codecs for values of `role`: those that the settings name, else those that suit it on any data."""
    if config.codecs is not None:
        return [name for name in config.codecs if _may_take(codec_type(name), role)]
    suited = [name for name in codecs_suiting(role) if codec_type(name).instead_of is None]
    # With a bound on errors, what INT4 is too coarse for may still do with the precise codec.
    finer = [precise_codec()] if config.max_error is not None and role != MASK else []
    return list(dict.fromkeys([*suited, *finer]))


def _may_take(codec: type[Codec], role: str) -> bool:
    """Whether settings that name a codec mean it for values of `role`: for masks only what suits them, and if it suits
    nothing else for nothing else."""
    return MASK in codec.suits if role == MASK else codec.suits != {MASK}


def is_parameter_cast(tape: Tape, value: int) -> bool:
    """Whether a value is made of parameters alone (a cast by autocast, a transposed copy): never compressed (rule
    R4)."""
    producer = tape.values[value].producer
    if producer is None:
        return tape.is_module_state(value)
    inputs = tape.operators[producer].inputs()
    return bool(inputs) and all(is_parameter_cast(tape, read) for read in inputs)


# Which values of a tape a lossy codec would degrade: they are kept, recomputed, or stored losslessly. Sums and norms
# have few elements, each of which decides about a whole row. Where backward takes an exponential or an angle of a
# value, its error is no longer a relative one. A mask's -inf takes up the whole scale of its group. And an element that
# comes back as 0 makes a gradient infinite that is divided by it, or by what a replay makes of it element by element.

V = TypeVar("V")

SUMMARY_RATIO = 8
"""What has a dimension less than what it is made of and this many times fewer elements saves little by codecs, and each
of its elements decides about many."""
EXPONENTS = ("log_softmax", "logsumexp", "cos", "sin")
"""Backward raises e to what these read or give, or takes its angle."""
_BIAS = ("attn_mask", "attn_bias", "bias")
"""What fused attention calls the argument that it adds to its scores."""
_WHOLE = ("log", "log2", "log10", "log1p", "logit", "asin", "acos", "atanh", "acosh", "sqrt", "hypot", "atan2")
DIVISORS: Mapping[str, int | None] = {"div": 1, "xlogy": 1, "addcdiv": 2} | dict.fromkeys(_WHOLE)
"""Operators whose gradient has a divisor of what they read or give, by the place of the argument that it is made of;
None: of any of it."""
ZERO_TO_ZERO = frozenset({"mul", "div", "neg", "abs", "relu", "pow", "sqrt", "clamp", "clamp_max", "minimum"})
ZERO_TO_ZERO |= {"clone", "to_copy", "convert_element_type"}
"""Operators that make an element 0 of an element that is 0, on tapes and in compiled graphs."""


def precision_sensitive_values(tape: Tape) -> set[int]:
    """Values that must be kept or recomputed, never compressed with loss."""
    summaries = {value.index for value in tape.values if _is_summary(tape, value.index)}
    return summaries | _exponents(tape) | _attention_biases(tape) | _divisors(tape)


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
    if is_statistic(size):
        return True
    return len(size) < len(source) and math.prod(size) * SUMMARY_RATIO <= math.prod(source)


def _exponents(tape: Tape) -> set[int]:
    """Values that backward takes an exponential or an angle of."""
    operators = [operator for operator in tape.operators if operator.short_name.startswith(EXPONENTS)]
    return {value for operator in operators for value in [*operator.inputs(), *operator.made()]}


def _attention_biases(tape: Tape) -> set[int]:
    """Values that fused attention adds to its scores: a mask, whose -inf no scale takes, or a bias of positions."""
    added = [attention_bias(operator.target, operator.args, operator.kwargs) for operator in tape.operators]
    return {ref.value for ref in added if isinstance(ref, TensorRef)}


def attention_bias(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator that is fused attention adds to its scores; None for other operators, and where it adds none."""
    given = attention_arguments(target, args, kwargs)
    return next((given[name] for name in _BIAS if given.get(name) is not None), None)


def attention_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name of an operator that is fused attention, or its backward; none of another one."""
    schema = schema_of(target) if isinstance(target, OpOverload) else None
    if schema is not None and any(name in schema.name for name in ("attention", "attn")):
        names = [argument.name for argument in schema.arguments]
    elif getattr(target, "__name__", "").startswith("flex_attention"):
        names = ["query", "key", "value"]
    else:
        return {}
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _divisors(tape: Tape) -> set[int]:
    """Values that backward divides by, and those of which replay makes one element by element."""
    return divisors(
        (_divided_by(operator), operator.made(), operator.inputs() if operator.short_name in ZERO_TO_ZERO else ())
        for operator in reversed(tape.operators)
    )


def divisors(operators: Iterable[tuple[Iterable[V], Iterable[V], Iterable[V]]]) -> set[V]:
    """What something is divided by, and what of that is made element by element, a 0 of a 0.

    `operators` are, the last one first: what is divided by for its sake, what it makes, and what a 0 in that comes of.
    """
    found: set[V] = set()
    for divided_by, made, zero_sources in operators:
        found.update(divided_by)
        if not found.isdisjoint(made):
            found.update(zero_sources)
    return found


def _divided_by(operator: TapeOperator) -> list[int]:
    name = operator.short_name
    if name == "pow":
        base, exponent = operator.args[:2]
        return [] if isinstance(exponent, (int, float)) and exponent >= 1 else _values(base)
    if name not in DIVISORS:
        return []
    place = DIVISORS[name]
    return [*operator.inputs(), *operator.made()] if place is None else _values(operator.args[place])


def _values(argument: object) -> list[int]:
    return [ref.value for ref in tensor_refs(argument)]
