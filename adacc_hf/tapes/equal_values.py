"""Values that are the same because the same operator made them from the same input: one storage serves them all.

Under autocast q, k and v each save a cast of one tensor, in three storages. A plan that keeps one of them and
recomputes the others takes these from the one that it keeps: nothing runs, and two storages are free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from adacc_hf.tapes.tape import Tape, TapeOperator, TensorRef, map_tensors


def equal_values(tape: Tape, recomputable: Collection[int]) -> dict[int, int]:
    """Values that an earlier saved one can stand for, mapped to the first such.

    Both came out of the same operator with the same arguments, in the same layout, and nothing changed them in place.
    Both are `recomputable`: replay of each gave the recorded bits (rule R7), so that the operator's results follow from
    its arguments and are equal too. A saved value's stand-in was saved first, since the first slot decides whose
    storage is kept.
    """
    makers: dict[Any, TapeOperator] = {}
    first: dict[int, int] = {}
    """Each value that repeats an earlier one, mapped to the first of its like."""
    for operator in tape.operators:
        if not _is_comparable(tape, operator, recomputable):
            continue
        maker = makers.setdefault(_call(operator, first), operator)
        if maker is not operator and _made_alike(tape, maker, operator):
            pairs = zip(operator.outputs, maker.outputs, strict=True)
            first.update({value: earlier for (_, value), (_, earlier) in pairs})
    return _stand_ins(tape, first)


def merged(tape: Tape, equal: Mapping[int, int]) -> Tape:
    """`tape`, with `equal[v]` in place of `v` wherever an operator reads it or a slot holds it."""
    operators = [substituted(operator, equal) for operator in tape.operators]
    slots = [_substituted(slot, equal) for slot in tape.slots]
    return replace(tape, operators=operators, slots=slots, _consumers={})


def substituted(operator: TapeOperator, equal: Mapping[int, int]) -> TapeOperator:
    """`operator`, reading `equal[v]` in place of `v`."""
    args, kwargs = _substituted((operator.args, operator.kwargs), equal)
    return replace(operator, args=args, kwargs=kwargs, _inputs=None)


def _is_comparable(tape: Tape, operator: TapeOperator, recomputable: Collection[int]) -> bool:
    made = operator.made()
    return (
        operator.may_run_again
        and not operator.mutations
        and all(value in recomputable and not tape.values[value].overwritten for value in made)
    )


def _call(operator: TapeOperator, first: Mapping[int, int]) -> Any:
    """What tells the operator's call from others: equal for calls that must give the same."""
    return operator.target, repr(_substituted((operator.args, operator.kwargs), first))


def _made_alike(tape: Tape, left: TapeOperator, right: TapeOperator) -> bool:
    """Whether two operators gave the same results in storages of the same layout."""
    if [position for position, _ in left.outputs] != [position for position, _ in right.outputs]:
        return False
    return all(_layout(tape, a) == _layout(tape, b) for (_, a), (_, b) in zip(left.outputs, right.outputs, strict=True))


def _layout(tape: Tape, value: int) -> Any:
    record = tape.values[value]
    return record.nbytes, record.ref.geometry, record.ref.dtype, record.device


def _stand_ins(tape: Tape, first: Mapping[int, int]) -> dict[int, int]:
    """For each value of a group the first saved one before it; groups of which nothing was saved gain nothing."""
    first_slot: dict[int, int] = {}
    for number, slot in enumerate(tape.slots):
        first_slot.setdefault(slot.value, number)
    saved: dict[int, int] = {}
    """For each group, known by its first value, the first saved value."""
    for value in sorted({*first, *first.values()}):
        if value in first_slot:
            saved.setdefault(first.get(value, value), value)
    return {
        value: saved[group]
        for value, group in first.items()
        if group in saved
        and saved[group] < value
        and first_slot[saved[group]] <= first_slot.get(value, len(tape.slots))
    }


def _substituted(tree: Any, equal: Mapping[int, int]) -> Any:
    return map_tensors(tree, TensorRef, lambda ref: replace(ref, value=equal.get(ref.value, ref.value)))
