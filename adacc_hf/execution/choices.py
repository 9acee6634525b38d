"""What becomes of a plan's choices on a tape that they may not have been made for."""

from __future__ import annotations

import torch

from adacc_hf.kernels.codecs import get_codec
from adacc_hf.policy import RECOMPUTE, RETAIN, Action, Choice
from adacc_hf.tapes.tape import Tape


def can_follow(choice: Choice, tape: Tape, value: int) -> bool:
    """Whether `choice` can be carried out for `value` of `tape`, which may not be the tape that it was made for."""
    if choice.action is Action.RECOMPUTE:
        return value in tape.recomputable
    if choice.action is Action.COMPRESS:
        record, codec = tape.values[value], get_codec(choice.codec, **dict(choice.options))
        return record.is_encodable and codec.supports(record.ref.geometry[0], record.ref.dtype)
    return True


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
    is_mask = record.ref.dtype is torch.bool and record.is_encodable
    return Choice(action=Action.COMPRESS, codec="bitmask") if is_mask else RETAIN
