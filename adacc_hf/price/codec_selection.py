"""Selection of codecs for each activation by its role (paper, section 3.2), their prices on the recorded tensors, and
the values that no lossy codec suits."""

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
"""Share of the channels assumed to be outliers if there is no data to count outliers in."""


def storable_values(tape: Tape) -> list[int]:
    """Return the values that a policy may act on: saved values that the block computed, and its inputs. Empty if the
    block's operators cannot be replayed."""
    if tape.untrusted is not None:
        return []
    saved = [v for v in tape.saved_values() if tape.values[v].source is None]
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    return sorted({*saved, *inputs})


def codec_candidates(tape: Tape, config: AdaccConfig) -> dict[int, list[str]]:
    """Return the names of the codecs that may compress each of the `storable_values`."""
    sensitive = precision_sensitive_values(tape)
    return {value: _codec_names(tape, value, config, value in sensitive) for value in storable_values(tape)}


def _codec_names(tape: Tape, value: int, config: AdaccConfig, is_sensitive: bool) -> list[str]:
    record, role = tape.values[value], role_of(tape, value)
    if record.nbytes < config.min_compress_bytes or not record.is_encodable or role == "parameter":
        return []
    is_lossless = role == MASK and config.codecs is None
    if not is_lossless and ("compress" not in config.actions or is_sensitive):
        return []
    return codecs_of_role(role, config)


def count_outlier_channels(tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
    """Return the number of outlier channels (paper, equation 1) of each activation that may have a codec with
    outliers."""
    if not config.outliers:
        return {}
    return {
        value: codec.count_outliers(view(bases[value], encode_view(tape, value)), config.zscore_threshold)
        for value, codec in outlier_codecs(tape, config).items()
    }


def outlier_codecs(tape: Tape, config: AdaccConfig) -> dict[int, Codec]:
    """Return the activations that may have a codec with outliers, each with this codec."""
    return {
        value: make_codec(name, config, 0)
        for value, names in codec_candidates(tape, config).items()
        for name in names
        if codec_type(name).keeps_outliers
    }


def make_codec(name: str, config: AdaccConfig, num_outliers: int) -> Codec:
    """Return the codec `name` with the options that `config` sets."""
    codec_class = codec_type(name)
    options = {option: getattr(config, option) for option in codec_class.settings}
    return get_codec(name, **options, **({"num_outliers": num_outliers} if codec_class.keeps_outliers else {}))


def assumed_outliers(channels: int, config: AdaccConfig, share: float = OUTLIER_SHARE) -> int:
    """Return the number of outliers among `channels` if there is no data to count outliers in."""
    return math.ceil(share * channels) if config.outliers else 0


def codec_options(
    tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, outliers: Mapping[int, int], resource: Bottleneck
) -> dict[int, tuple[CodecOption, ...]]:
    """Return the codec options of each of the `storable_values`. Prices are measured on the recorded tensor, as time of
    `resource`."""
    options = {}
    for value, names in codec_candidates(tape, config).items():
        tensor = view(bases[value], encode_view(tape, value))
        codecs = [make_codec(name, config, outliers.get(value, 0)) for name in names]
        suitable_codecs = [c for c in codecs if c.supports(tuple(tensor.shape), tensor.dtype) and c.accepts(tensor)]
        if config.codecs is None:
            suitable_codecs = [_most_accurate(codec, role_of(tape, value), tensor, config) for codec in suitable_codecs]
        options[value] = tuple(_price(codec, tensor, resource) for codec in suitable_codecs)
    return options


def _most_accurate(codec: Codec, role: str, tensor: torch.Tensor, config: AdaccConfig) -> Codec:
    """Return `codec`, or a codec that replaces it on tensors of `role` and is more accurate on `tensor`."""
    replacement_codecs = [make_codec(name, config, 0) for name in replacements(codec.name, role)]
    replacement_codecs = [other for other in replacement_codecs if other.supports(tuple(tensor.shape), tensor.dtype)]
    if not replacement_codecs:
        return codec
    return min([codec, *replacement_codecs], key=lambda candidate: _round_trip_error(candidate, tensor))


def precise_codec_options(
    tape: Tape, bases: Sequence[torch.Tensor], config: AdaccConfig, values: Sequence[int], resource: Bottleneck
) -> dict[int, tuple[CodecOption, ...]]:
    """Return the precise codec's option for each of the `values` that it supports. Empty if the settings name the
    codecs."""
    options: dict[int, tuple[CodecOption, ...]] = {}
    for value in values if config.codecs is None else ():
        tensor, codec = view(bases[value], encode_view(tape, value)), make_codec(precise_codec(), config, 0)
        if codec.supports(tuple(tensor.shape), tensor.dtype):
            options[value] = (_price(codec, tensor, resource),)
    return options


def with_outliers(
    options: tuple[CodecOption, ...], tape: Tape, value: int, config: AdaccConfig, num_outliers: int
) -> tuple[CodecOption, ...]:
    """Return `options` with an outlier codec that keeps `num_outliers` channels, the largest number in any block of the
    kind."""
    size, ref = encode_view(tape, value).geometry[0], tape.values[value].ref
    codecs = [make_codec(option.codec, config, num_outliers) for option in options]
    return tuple(
        replace(option, options=tuple(sorted(codec.options.items())), nbytes=codec.predicted_bytes(size, ref.dtype))
        for option, codec in zip(options, codecs, strict=True)
    )


def _price(codec: Codec, tensor: torch.Tensor, resource: Bottleneck) -> CodecOption:
    codec.fit(tensor)
    payload = codec.encode(tensor)
    return CodecOption(
        codec=codec.name,
        options=tuple(sorted(codec.options.items())),
        nbytes=codec.predicted_bytes(tuple(tensor.shape), tensor.dtype),
        encode_ms=getattr(time_of(lambda: codec.encode(tensor), tensor.device), resource),
        decode_ms=getattr(time_of(lambda: codec.decode(payload), tensor.device), resource),
        error=0.0 if codec.lossless else float(relative_error([tensor], [codec.decode(payload)])),
        lossless=codec.lossless,
    )


def _round_trip_error(codec: Codec, tensor: torch.Tensor) -> float:
    return float(relative_error([tensor], [codec.decode(codec.encode(tensor))]))


# Roles of values. A value's role decides which codecs suit it (paper, section 3.2).

_ATTENTION = ("scaled_dot_product", "bmm", "baddbmm")
_MATMUL = ("mm", "addmm", "linear")
_NORM = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
_ACTIVATION = ("gelu", "silu", "relu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "mish", "pow")


def role_of(tape: Tape, value: int) -> str:
    """Return the role of a value, from the operators that produce and read it.

    The role is one of ROLES, or "parameter" for parameters and values computed from parameters alone, or "generator"
    for a random generator's state.
    """
    record = tape.values[value]
    if is_parameter_cast(tape, value):
        return "parameter"
    if tape.is_block_input(value):
        return "input"
    if tape.is_generator_state(value):
        return "generator"
    if record.ref.dtype is torch.bool or _is_random_draw(tape, value):
        return MASK
    if _is_softmax(tape, value):
        return "softmax"
    readers = [tape.operators[index] for index in tape.consumers(value)]
    if any(reader.short_name.startswith(_ATTENTION) and _is_activation_product(tape, reader) for reader in readers):
        return "qkv"
    reader_names = [reader.short_name for reader in readers]
    producer_names = [tape.operators[record.producer].short_name] if record.producer is not None else []
    for role, operator_names in (("norm", _NORM), ("linear", _MATMUL), ("activation", _ACTIVATION)):
        if any(name.startswith(operator_names) for name in reader_names + producer_names * (role == "activation")):
            return role
    return "other"


def _is_random_draw(tape: Tape, value: int) -> bool:
    """Return True if a value is a random draw, possibly scaled, such as dropout's mask."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if operator.random:
        return not operator.is_attention
    is_scaled = operator.short_name in ("div", "mul") and len(operator.inputs()) == 1
    return is_scaled and _is_random_draw(tape, operator.inputs()[0])


def _is_softmax(tape: Tape, value: int) -> bool:
    """Return True if a value is a softmax, with or without dropout applied (the paper's score)."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if "softmax" in operator.short_name:
        return True
    keeps_role = operator.short_name in ("mul", "native_dropout_backward", "clone", "to_copy")
    return keeps_role and any(_is_softmax(tape, read) for read in operator.inputs())


def _is_activation_product(tape: Tape, operator: TapeOperator) -> bool:
    """Return True if a product's operands are activations and not parameters."""
    return not any(tape.is_module_state(value) for value in operator.inputs())


def codecs_of_role(role: str, config: AdaccConfig) -> list[str]:
    """Return the names of the codecs for values of `role`: the codecs that the settings name, else the codecs that suit
    the role on any data."""
    if config.codecs is not None:
        return [name for name in config.codecs if _may_encode(codec_type(name), role)]
    suitable = [name for name in codecs_suiting(role) if codec_type(name).instead_of is None]
    # Under a bound on errors, the precise codec may still encode values for which INT4 is too coarse.
    precise = [precise_codec()] if config.max_error is not None and role != MASK else []
    return list(dict.fromkeys([*suitable, *precise]))


def _may_encode(codec: type[Codec], role: str) -> bool:
    """Return True if a codec that the settings name applies to values of `role`. Masks need a codec that suits masks,
    and a codec that suits only masks applies to nothing else."""
    return MASK in codec.suits if role == MASK else codec.suits != {MASK}


def is_parameter_cast(tape: Tape, value: int) -> bool:
    """Return True if a value is computed from parameters alone, such as autocast's cast or a transposed copy. Such a
    value is never compressed (rule R4)."""
    producer = tape.values[value].producer
    if producer is None:
        return tape.is_module_state(value)
    inputs = tape.operators[producer].inputs()
    return bool(inputs) and all(is_parameter_cast(tape, read) for read in inputs)


# Precision-sensitive values, which a lossy codec would degrade. They are retained, recomputed, or stored losslessly.
# - Sums and norms have few elements, and each element affects a whole row.
# - If backward takes an exponential or an angle of a value, a relative error does not stay relative.
# - A mask's -inf uses up the whole scale of its group.
# - A gradient is infinite if it is divided by an element that decodes to 0, or by a value that replay computes from
#   such an element.

V = TypeVar("V")

SUMMARY_RATIO = 8
"""A value with one dimension less than its source and this many times fewer elements is a summary. A codec saves little
on it, and each element affects many others."""
EXPONENTS = ("log_softmax", "logsumexp", "cos", "sin")
"""Operators in whose backward an input or a result is exponentiated, or used as an angle."""
_BIAS = ("attn_mask", "attn_bias", "bias")
"""Names of the argument that fused attention adds to its scores."""
_WHOLE = ("log", "log2", "log10", "log1p", "logit", "asin", "acos", "atanh", "acosh", "sqrt", "hypot", "atan2")
DIVISORS: Mapping[str, int | None] = {"div": 1, "xlogy": 1, "addcdiv": 2} | dict.fromkeys(_WHOLE)
"""Operators whose gradient is divided by an input or a result, each with the position of the divisor among the
arguments. None means any input or result."""
ZERO_TO_ZERO = frozenset({"mul", "div", "neg", "abs", "relu", "pow", "sqrt", "clamp", "clamp_max", "minimum"})
ZERO_TO_ZERO |= {"clone", "to_copy", "convert_element_type"}
"""Operators that map an element 0 to an element 0, on tapes and in compiled graphs."""


def precision_sensitive_values(tape: Tape) -> set[int]:
    """Return the values that must not be compressed with a lossy codec."""
    summaries = {value.index for value in tape.values if _is_summary(tape, value.index)}
    return summaries | _exponents(tape) | _attention_biases(tape) | _divisors(tape)


def _is_summary(tape: Tape, value: int) -> bool:
    record = tape.values[value]
    operator = None if record.producer is None else tape.operators[record.producer]
    reads = [] if operator is None else [ref.geometry[0] for ref in tensor_refs((operator.args, operator.kwargs))]
    return is_summary(record.ref.geometry[0], reads[0] if reads else ())


def is_summary(size: Sequence[int], source: Sequence[int]) -> bool:
    """Return True if a value of shape `size` has a few numbers for each row of `source`, the shape of its operator's
    first operand.

    Examples are a mean, a norm, or the log-sum-exp of attention, possibly padded. The result of a product or an index
    is no summary: it has as many dimensions as its operand, even if it has few rows or columns.
    """
    if is_statistic(size):
        return True
    return len(size) < len(source) and math.prod(size) * SUMMARY_RATIO <= math.prod(source)


def _exponents(tape: Tape) -> set[int]:
    """Return the values whose exponential or angle backward computes."""
    operators = [operator for operator in tape.operators if operator.short_name.startswith(EXPONENTS)]
    return {value for operator in operators for value in [*operator.inputs(), *operator.results()]}


def _attention_biases(tape: Tape) -> set[int]:
    """Return the values that fused attention adds to its scores: a mask, whose -inf no scale can represent, or a
    position bias."""
    biases = [attention_bias(operator.target, operator.args, operator.kwargs) for operator in tape.operators]
    return {ref.value for ref in biases if isinstance(ref, TensorRef)}


def attention_bias(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a fused attention operator adds to its scores. Return None for other operators, and
    without such an argument."""
    arguments = attention_arguments(target, args, kwargs)
    return next((arguments[name] for name in _BIAS if arguments.get(name) is not None), None)


def attention_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name of fused attention or its backward. Empty for other operators."""
    schema = schema_of(target) if isinstance(target, OpOverload) else None
    if schema is not None and any(name in schema.name for name in ("attention", "attn")):
        names = [argument.name for argument in schema.arguments]
    elif getattr(target, "__name__", "").startswith("flex_attention"):
        names = ["query", "key", "value"]
    else:
        return {}
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _divisors(tape: Tape) -> set[int]:
    """Return the values that backward divides by, and the values from which replay computes these elementwise."""
    return divisors(
        (
            _operator_divisors(operator),
            operator.results(),
            operator.inputs() if operator.short_name in ZERO_TO_ZERO else (),
        )
        for operator in reversed(tape.operators)
    )


def divisors(operators: Iterable[tuple[Iterable[V], Iterable[V], Iterable[V]]]) -> set[V]:
    """Return the values used as divisors, and the values they are computed from elementwise if zero maps to zero.

    `operators` is in reverse order. Each element has three parts: the operator's divisors, its results, and the inputs
    whose zeros become zeros of the results.
    """
    all_divisors: set[V] = set()
    for operator_divisors, results, zero_sources in operators:
        all_divisors.update(operator_divisors)
        if not all_divisors.isdisjoint(results):
            all_divisors.update(zero_sources)
    return all_divisors


def _operator_divisors(operator: TapeOperator) -> list[int]:
    name = operator.short_name
    if name == "pow":
        base, exponent = operator.args[:2]
        return [] if isinstance(exponent, (int, float)) and exponent >= 1 else _values(base)
    if name not in DIVISORS:
        return []
    place = DIVISORS[name]
    return [*operator.inputs(), *operator.results()] if place is None else _values(operator.args[place])


def _values(argument: object) -> list[int]:
    return [ref.value for ref in tensor_refs(argument)]
