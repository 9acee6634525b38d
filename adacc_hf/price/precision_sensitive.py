"""Precision-sensitive values: stored with a lossy codec, they would degrade gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from adacc_hf.artifacts.exact_recompute_rules import is_statistic
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, tensor_refs
from adacc_hf.torch_glue.private import OpOverload, schema_of

V = TypeVar("V")

SUMMARY_RATIO = 8
"""Minimum number of elements that an operator reads per element of a summary, such as a mean. Compressing the summary
would save few bytes, and each of its elements affects many others."""
EXPONENTS = ("log_softmax", "logsumexp", "cos", "sin")
"""Operators whose backward takes the exponential of an input or a result, or uses an input as an angle."""
_BIAS = ("attn_mask", "attn_bias", "bias")
"""Possible names of the argument that fused attention adds to its scores."""
_WHOLE = ("log", "log2", "log10", "log1p", "logit", "asin", "acos", "atanh", "acosh", "sqrt", "hypot", "atan2")
DIVISORS: Mapping[str, int | None] = {"div": 1, "xlogy": 1, "addcdiv": 2} | dict.fromkeys(_WHOLE)
"""Operators whose backward divides, with the divisor's position among the arguments, or None for any input or
result."""
ZERO_TO_ZERO = frozenset({"mul", "div", "neg", "abs", "relu", "pow", "sqrt", "clamp", "clamp_max", "minimum"})
ZERO_TO_ZERO |= {"clone", "to_copy", "convert_element_type"}
"""Operators, on tapes and in compiled graphs, that map elements of 0 to 0."""


def precision_sensitive_values(tape: Tape) -> set[int]:
    """Return the values on `tape` that must not be compressed with a lossy codec."""
    summaries = {value.index for value in tape.values if _is_summary(tape, value.index)}
    return summaries | _exponent_values(tape) | _attention_biases(tape) | _divisor_values(tape)


def _is_summary(tape: Tape, value: int) -> bool:
    """Return True if a recorded value summarizes many elements, such as a mean, so that no lossy codec may store it."""
    record = tape.values[value]
    operator = None if record.producer is None else tape.operators[record.producer]
    reads = [] if operator is None else [ref.geometry[0] for ref in tensor_refs((operator.args, operator.kwargs))]
    return is_summary(record.ref.geometry[0], reads[0] if reads else ())


def is_summary(size: Sequence[int], source: Sequence[int]) -> bool:
    """Return True if a tensor of shape `size`, computed from one of shape `source`, has only a few numbers for each
    row.

    Examples are a mean, a norm, or attention's log-sum-exp, possibly padded. The result of a product or an index is not
    a summary: it has as many dimensions as its operand.
    """
    if is_statistic(size):
        return True
    return len(size) < len(source) and math.prod(size) * SUMMARY_RATIO <= math.prod(source)


def _exponent_values(tape: Tape) -> set[int]:
    """Return the recorded values that backward uses as exponents, or as angles of a sine or cosine."""
    operators = [operator for operator in tape.operators if operator.short_name.startswith(EXPONENTS)]
    return {value for operator in operators for value in [*operator.inputs(), *operator.results()]}


def _attention_biases(tape: Tape) -> set[int]:
    """Return the recorded values that fused attention adds to its scores: a mask with -inf, or a position bias."""
    biases = [attention_bias(operator.target, operator.args, operator.kwargs) for operator in tape.operators]
    return {ref.value for ref in biases if isinstance(ref, TensorRef)}


def attention_bias(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that a fused attention operator adds to its scores, or None."""
    arguments = attention_arguments(target, args, kwargs)
    return next((arguments[name] for name in _BIAS if arguments.get(name) is not None), None)


def attention_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of fused attention, or of its backward, by name. Return {} for other operators."""
    schema = schema_of(target) if isinstance(target, OpOverload) else None
    if schema is not None and any(name in schema.name for name in ("attention", "attn")):
        names = [argument.name for argument in schema.arguments]
    elif getattr(target, "__name__", "").startswith("flex_attention"):
        names = ["query", "key", "value"]
    else:
        return {}
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _divisor_values(tape: Tape) -> set[int]:
    """Return the recorded values that backward divides by, and those from which divisors are computed elementwise."""
    return divisors(
        (
            _operator_divisors(operator),
            operator.results(),
            operator.inputs() if operator.short_name in ZERO_TO_ZERO else (),
        )
        for operator in reversed(tape.operators)
    )


def divisors(operators: Iterable[tuple[Iterable[V], Iterable[V], Iterable[V]]]) -> set[V]:
    """Return the values that backward divides by, and the values whose zeros become zeros of such a divisor, as of the
    input of sqrt: a lossy codec may make zeros.

    `operators` contains for each operator, from the last to the first, its divisors, its results, and the inputs whose
    zeros become zeros of the results.
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
        return [] if isinstance(exponent, (int, float)) and exponent >= 1 else _values_read(base)
    if name not in DIVISORS:
        return []
    place = DIVISORS[name]
    return [*operator.inputs(), *operator.results()] if place is None else _values_read(operator.args[place])


def _values_read(argument: object) -> list[int]:
    return [ref.value for ref in tensor_refs(argument)]
