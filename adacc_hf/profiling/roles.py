"""Roles: the class of tensor that a value is, which decides which codec suits it (paper, section 3.2)."""

from __future__ import annotations

import torch

from adacc_hf.config import AdaccConfig
from adacc_hf.tapes.tape import Tape, TapeOperator

_ATTENTION = ("scaled_dot_product", "bmm", "baddbmm")
_MATMUL = ("mm", "addmm", "linear")
_NORM = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
_ACTIVATION = ("gelu", "silu", "relu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "elu", "mish", "pow")

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
        return True
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
    """Names of the codecs for values of `role` where the settings name none."""
    # With a bound on errors, what INT4 is too coarse for may still do with INT8.
    return list(dict.fromkeys([CODEC_OF_ROLE[role], *(["int8"] if config.max_error is not None else [])]))


def is_parameter_cast(tape: Tape, value: int) -> bool:
    """Whether a value is made of parameters alone (a cast by autocast, a transposed copy): never compressed (rule
    R4)."""
    producer = tape.values[value].producer
    if producer is None:
        return tape.is_module_state(value)
    inputs = tape.operators[producer].inputs()
    return bool(inputs) and all(is_parameter_cast(tape, read) for read in inputs)
