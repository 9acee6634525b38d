"""Times computed from bytes instead of measured times, for results that must not depend on the noise of
measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from adacc_hf.artifacts.policy import RETAIN

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile, Operator
    from adacc_hf.solve.milp import KindModel, StoredForm

MS_PER_BYTE = 1e-6
"""Assumed time in ms per byte that an operator or a codec reads or writes. Any positive number gives the same
policies."""


def price_by_bytes(model: KindModel) -> KindModel:
    """Return a copy of `model` in which the time of each operator, codec and checkpoint is proportional to bytes.

    The time of an operator is proportional to the bytes that it reads and writes. The time of a codec is proportional
    to the bytes of the tensor and of its encoded payload, once for encoding and once for decoding. Actions and stored
    bytes do not change.
    """
    kind, profiled_kind = _kind_by_bytes(model.kind), _kind_by_bytes(model.profiled_kind)
    value_bytes = [value.nbytes for value in kind.values]
    menus = {
        value: tuple(
            form if form.choice == RETAIN else replace(form, ms=_codec_ms(value_bytes[value], form)) for form in menu
        )
        for value, menu in model.menus.items()
    }
    rerun_ms = sum(operator.ms for operator in profiled_kind.operators)
    checkpoints = tuple(
        replace(plan, ms=rerun_ms + MS_PER_BYTE * (plan.nbytes + plan.host_bytes)) for plan in model.checkpoints
    )
    return replace(model, kind=kind, profiled_kind=profiled_kind, menus=menus, checkpoints=checkpoints)


def _kind_by_bytes(kind: KindProfile) -> KindProfile:
    operators = tuple(replace(op, ms=_operator_ms(kind, op)) for op in kind.operators)
    return replace(kind, operators=operators, extra_ms=0.0)


def _codec_ms(nbytes: int, form: StoredForm) -> float:
    return 2 * MS_PER_BYTE * (nbytes + form.nbytes + form.host_bytes)


def _operator_ms(kind: KindProfile, operator: Operator) -> float:
    # A view makes no bytes of its own, but a replay of it is not free: each operator costs at least one byte.
    return MS_PER_BYTE * (1 + sum(kind.values[value].nbytes for value in (*operator.inputs, *operator.outputs)))
