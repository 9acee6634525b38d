"""What becomes of a plan's choices on a tape that they may not have been made for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from adacc_hf.decisions import decided, is_statistic, made_from
from adacc_hf.kernels.codecs import Codec, get_codec
from adacc_hf.policy import MASK_CODEC, RECOMPUTE, RETAIN, Action, Choice
from adacc_hf.tapes.tape import Tape


def can_follow(choice: Choice, tape: Tape, value: int) -> bool:
    """Whether `choice` can be carried out for `value` of `tape`, which may not be the tape that it was made for."""
    if choice.action is Action.RECOMPUTE:
        return value in tape.recomputable
    if choice.action is Action.COMPRESS:
        record, codec = tape.values[value], _codec(choice)
        return record.is_encodable and codec.supports(record.ref.geometry[0], record.ref.dtype)
    return True


def choices_by_value(
    choices: Mapping[int, Choice], tape: Tape, same: Mapping[int, int], with_loss: bool
) -> dict[int, Choice]:
    """`choices` for the values of `tape` that are those of the planned one, by `same`; least memory for all others.

    Unless `with_loss`, lossy ones are not followed: what becomes of gradients is known of the planned operators alone.
    """
    planned = {same[value]: choice for value, choice in choices.items() if value in same}
    held = {value for value in same.values() if tape.is_block_input(value)} - planned.keys()
    found = {value: choice for value, choice in least_memory_choices(tape).items() if value not in held}
    for value in found.keys() & planned.keys():
        choice = planned[value]
        if can_follow(choice, tape, value) and (with_loss or choice.codec is None or _codec(choice).lossless):
            found[value] = choice
    return found | dict.fromkeys(unfit(found, tape), RETAIN)


def unfit(choices: Mapping[int, Choice], tape: Tape) -> list[int]:
    """Values whose choice cannot be carried out on `tape`, or would make what no replay may (`adacc_hf.decisions`)."""
    coded = {v for v, c in choices.items() if c.action is Action.COMPRESS and not _codec(c).lossless}
    kept = decided(
        ((operator.inputs(), operator.made()) for operator in tape.operators),
        lambda value: _is_index(tape.values[value].ref.dtype),
        coded,
        set(tape.saved_values()),
    )

    def is_unfit(value: int, choice: Choice) -> bool:
        if not can_follow(choice, tape, value):
            return True
        return choice == RECOMPUTE and (value in kept or _is_statistic_of(coded, value, choices, tape))

    return [value for value, choice in choices.items() if is_unfit(value, choice)]


def _is_statistic_of(coded: Collection[int], value: int, choices: Collection[int], tape: Tape) -> bool:
    """Whether a value has one number for each row, and a replay would make it from rows in `coded`."""

    def reads(made: int) -> tuple[int, ...]:
        producer = tape.values[made].producer
        return () if producer is None else tape.operators[producer].inputs()

    if not is_statistic(tape.values[value].ref.geometry[0]):
        return False
    return not made_from(value, reads, choices.__contains__).isdisjoint(coded)


def _codec(choice: Choice) -> Codec:
    return get_codec(choice.codec, **dict(choice.options))


def _is_index(dtype: torch.dtype) -> bool:
    """As `Value.is_index`."""
    return not (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def least_memory_choices(tape: Tape) -> dict[int, Choice]:
    """The lossless choices that store least."""
    inputs = [value.index for value in tape.values if tape.is_block_input(value.index)]
    made = [value for value in tape.saved_values() if tape.values[value].source is None]
    return dict.fromkeys(inputs, RETAIN) | {value: least_memory(tape, value) for value in made}


def least_memory(tape: Tape, value: int) -> Choice:
    """The lossless choice that stores least for a value that the block made."""
    record = tape.values[value]
    if value in tape.recomputable:
        return RECOMPUTE
    is_mask = record.is_encodable and (record.ref.dtype is torch.bool or _is_drawn_mask(tape, value))
    return Choice(action=Action.COMPRESS, codec=MASK_CODEC) if is_mask else RETAIN


def _is_drawn_mask(tape: Tape, value: int) -> bool:
    """Whether a value is 0 or one other number by how it is made, as dropout's mask on a CPU: zeros and ones that were
    drawn, perhaps divided by a number."""
    producer = tape.values[value].producer
    if producer is None:
        return False
    operator = tape.operators[producer]
    if operator.random:
        return operator.short_name == "bernoulli"
    # By more than 0: a mask of -0.0 has three bit patterns.
    is_scaled = operator.short_name == "div" and len(operator.args) == 2 and isinstance(operator.args[1], (int, float))
    return is_scaled and operator.args[1] > 0 and _is_drawn_mask(tape, operator.inputs()[0])
