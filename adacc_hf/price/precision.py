"""Which values of a tape a lossy codec would degrade: they are kept, recomputed, or stored losslessly.

Sums and norms have few elements, each of which decides about a whole row. Where backward takes an exponential or an
angle of a value, its error is no longer a relative one. A mask's -inf takes up the whole scale of its group. And an
element that comes back as 0 makes a gradient infinite that is divided by it, or by what a replay makes of it element
by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from adacc_hf.artifacts.index_values import is_statistic
from adacc_hf.tape.tape import Tape, TapeOperator, TensorRef, tensor_refs
from adacc_hf.torch_glue.private import OpOverload, schema_of

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
