"""What backward divides by: an element that a lossy codec makes 0 there makes a gradient infinite.

Such values are kept, remade, or stored losslessly, and so is what a replay makes them of element by element, where 0
gives 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from adacc_hf.tapes.tape import Tape, TapeOperator, tensor_refs

_WHOLE = ("log", "log2", "log10", "log1p", "logit", "asin", "acos", "atanh", "acosh", "sqrt", "hypot", "atan2")
DIVISORS: Mapping[str, int | None] = {"div": 1, "xlogy": 1, "addcdiv": 2} | dict.fromkeys(_WHOLE)
"""Operators whose gradient has a divisor of what they read or give, by the place of the argument that it is made of;
None: of any of it."""
ZERO_TO_ZERO = frozenset(("mul", "div", "to_copy", "clone", "neg", "abs", "relu", "clamp", "clamp_max", "pow", "sqrt"))
"""Operators that make an element 0 of an element that is 0."""


def divisors(tape: Tape) -> set[int]:
    """Values that backward divides by, and those of which replay makes one element by element."""
    found: set[int] = set()
    for operator in reversed(tape.operators):
        name = _name(operator)
        found.update(_divided_by(operator))
        if name in ZERO_TO_ZERO and not found.isdisjoint(operator.made()):
            found.update(operator.inputs())
    return found


def _divided_by(operator: TapeOperator) -> list[int]:
    name = _name(operator)
    if name == "pow":
        base, exponent = operator.args[:2]
        return [] if isinstance(exponent, (int, float)) and exponent >= 1 else _values(base)
    if name not in DIVISORS:
        return []
    place = DIVISORS[name]
    return [*operator.inputs(), *operator.made()] if place is None else _values(operator.args[place])


def _values(argument: object) -> list[int]:
    return [ref.value for ref in tensor_refs(argument)]


def _name(operator: TapeOperator) -> str:
    return operator.target._opname.strip("_")
