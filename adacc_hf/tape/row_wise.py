"""Row-wise modules of a block, found from the block's tape: modules that compute each token from that token alone.

The input of such a module consists of rows, one per token: all dimensions but the last. The module is row-wise if each
of its operators computes a row of its result from the same row of its operands, and from tensors without rows
(parameters). Such a module can run on a few rows at a time (tape/tiled_rows.py). Attention is not row-wise, because it
combines tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from adacc_hf.tape.tape import Blank, Tape, TapeOperator, TensorRef, leaves, tensor_refs
from adacc_hf.torch_glue.private import OpOverload, op_name

LEAST_INNER_SHARE = 3
"""Least bytes of a module's inner tensors, relative to the bytes of its result. Tiles of a single linear layer would
save little memory."""
PRODUCTS = ("mm", "addmm")
"""Operators of linear layers. At most one module with such products runs in tiles in each block, because the second
forward takes time."""


@dataclass(frozen=True, kw_only=True)
class RowWiseModule:
    """A row-wise module of a block."""

    path: str
    """Path of the module in the block."""
    num_rows: int
    input: TensorRef
    """Input of the module on the tape."""
    result: int
    """Value on the tape that the module returns."""
    inner_bytes: int
    """Bytes of all tensors that the module computes, without its result."""
    has_products: bool
    """True if the module contains linear layers."""
    is_random: bool
    """True if the module draws random numbers."""
    operators: tuple[int, ...]
    """Indices of the module's operators on the tape."""


def row_wise_modules(tape: Tape) -> tuple[RowWiseModule, ...]:
    """Return the row-wise modules of a recorded block that are worth running in tiles, in the order in which they run.

    The inner tensors of each module are LEAST_INNER_SHARE times as large as its result, or larger. Of the modules with
    linear layers, only the module whose inner tensors take the most bytes is returned: an MLP. The others are norms
    that compute in float32, and activation functions of many operators, without random numbers.
    """
    if tape.untrusted is not None:
        return ()
    paths: dict[str, None] = {}  # of modules that run operators, and of the modules around them
    for operator in tape.operators:
        parts = operator.module.split(".")
        paths |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1) if operator.module)
    modules = [module for path in paths if (module := _check_module(tape, path)) is not None]
    chosen: list[RowWiseModule] = []
    for module in sorted(modules, key=lambda module: -module.inner_bytes):
        is_inside = any(not set(module.operators).isdisjoint(other.operators) for other in chosen)
        is_second = any(other.has_products for other in chosen) if module.has_products else module.is_random
        if not is_inside and not is_second:
            chosen.append(module)
    return tuple(sorted(chosen, key=lambda module: module.operators))


def _check_module(tape: Tape, path: str) -> RowWiseModule | None:
    own = [op for op in tape.operators if op.module == path or op.module.startswith(f"{path}.")]
    indices = tuple(operator.index for operator in own)
    if indices != tuple(range(indices[0], indices[-1] + 1)):  # called several times, or with other code in between
        return None
    own_values = {value for operator in own for value in operator.results()}
    read_outside = [op.inputs() for op in tape.operators if op.index not in indices]
    results = [*own_values.intersection(*[set().union(*read_outside)])]
    results = results or own[-1].results()
    result = results[0] if len(results) == 1 else None
    inputs = [value for operator in own for value in operator.inputs() if value not in own_values]
    tokens = {value for value in inputs if not _is_state_of(tape, value, path) and not tape.is_generator_state(value)}
    if result is None or len(tokens) != 1:
        return None
    rows = _Rows(tape, tokens.pop(), own)
    if rows.number < 2 or not all(map(rows.follow, own)) or result not in rows.widths:
        return None
    inner_bytes = sum(tape.values[value].nbytes for value in own_values if value != result and value in rows.widths)
    if inner_bytes < LEAST_INNER_SHARE * tape.values[result].nbytes:
        return None
    return RowWiseModule(
        path=path,
        num_rows=rows.number,
        input=rows.input,
        result=result,
        inner_bytes=inner_bytes,
        has_products=any(isinstance(op.target, OpOverload) and op_name(op.target) in PRODUCTS for op in own),
        is_random=any(op.random for op in own),
        operators=indices,
    )


def _is_state_of(tape: Tape, value: int, path: str) -> bool:
    """Return True if the value is a parameter or buffer of the module at `path`, or a tensor attached to one of them or
    to the module, such as the scales of a 4-bit weight."""
    source = tape.values[value].source
    return source is not None and tape.is_module_state(value) and f"{source.path[0]}.".startswith(f"{path}.")


class _Rows:
    """Values of a tape whose storage consists of rows of equal width, one for each row of the module's input."""

    def __init__(self, tape: Tape, value: int, own: Sequence[TapeOperator]) -> None:
        self._tape = tape
        refs = [ref for op in own for ref in tensor_refs((op.args, op.kwargs)) if ref.value == value]
        shapes = {ref.geometry[0] for ref in refs}
        counts = {prod(shape[:-1]) if len(shape) > 1 else 0 for shape in shapes}
        self.input = refs[0]
        self.number = counts.pop() if len(counts) == 1 else 0
        self.widths: dict[int, int] = {}
        """Elements per row, by value."""
        if self.number:
            self._add(value)

    def _add(self, value: int) -> bool:
        """Add `value` if its storage consists of rows in the order of the module's rows. Return False otherwise."""
        record = self._tape.values[value]
        width, rest = divmod(record.nbytes, self.number * record.ref.dtype.itemsize)
        if rest or not width:
            return False
        self.widths[value] = width
        return self.split(record.ref) is not None

    def split(self, ref: TensorRef) -> int | None:
        """Return how many leading dimensions of the tensor `ref` count rows. Return None if the tensor is not a
        sequence of whole or partial rows."""
        size, stride, offset = ref.geometry
        split = next((end for end in range(1, len(size) + 1) if prod(size[:end]) == self.number), None)
        width = self.widths[ref.value]
        if split is None:
            return None
        expected = width
        for length, step in zip(reversed(size[:split]), reversed(stride[:split]), strict=True):
            if length != 1 and step != expected:
                return None
            expected *= length
        inner = zip(size[split:], stride[split:], strict=True)
        is_within_row = offset + sum((length - 1) * step for length, step in inner) < width
        return split if is_within_row else None

    def follow(self, operator: TapeOperator) -> bool:
        """Add the results of an operator. Return False if the operator is not row-wise."""
        refs = [ref for ref in tensor_refs((operator.args, operator.kwargs)) if ref.value in self.widths]
        changed = {old for old, _ in operator.mutations}
        if not refs and not operator.blanks():
            return not operator.random and not changed and not operator.is_collective
        is_plain = isinstance(operator.target, OpOverload) and not operator.is_collective
        # A tile is a view of the input, so the module must not write to its input.
        if not is_plain or self.input.value in changed:
            return False
        splits = [self.split(ref) for ref in refs]
        row_splits = [split for split in splits if split is not None]
        check = _CHECKS.get(operator.short_name)
        if check is None and torch.Tag.pointwise in operator.target.tags:
            check = _is_pointwise
        results = [self._tape.values[value].ref for value in operator.results()]
        if check is None or len(row_splits) != len(splits) or not check(_Call(operator, refs, row_splits, results)):
            return False
        return all(map(self._add, operator.results()))


class _Call(NamedTuple):
    """A call of an operator that reads rows."""

    operator: TapeOperator
    refs: list[TensorRef]
    """Operands with rows."""
    splits: list[int]
    """Number of row dimensions of each of `refs`."""
    results: list[TensorRef]


def _is_pointwise(call: _Call) -> bool:
    """Return True if each row of a pointwise operator's result depends only on the same row of each operand.

    An operand that does not consist of rows, such as a bias, must be the same for all rows.
    """
    size = call.results[0].geometry[0] if call.results else ()
    ends = {len(size) - (len(ref.geometry[0]) - split) for ref, split in zip(call.refs, call.splits, strict=True)}
    if len(ends) > 1:
        return False
    end = ends.pop() if ends else None
    row_refs = {id(ref) for ref in call.refs}
    operands = (
        leaf for leaf in leaves(call.operator.args, call.operator.kwargs) if isinstance(leaf, TensorRef | Blank)
    )
    for ref in operands:
        lengths = (1,) * (len(size) - len(ref.geometry[0])) + ref.geometry[0]
        if id(ref) not in row_refs and end is not None and any(length != 1 for length in lengths[:end]):
            return isinstance(ref, Blank) and ref.geometry[0] == size
        if id(ref) in row_refs and lengths[:end] != size[:end]:
            return False
    return True


def _is_product(call: _Call) -> bool:
    place = 1 if len(call.operator.args) > 2 else 0
    return _reads_rows_at(call, place) and call.splits[0] == 1 and len(call.refs[0].geometry[0]) == 2


def _reads_rows_at(call: _Call, place: int) -> bool:
    """Return True if the only operand with rows is the argument at `place`."""
    return len(call.refs) == 1 and call.operator.args[place] is call.refs[0]


def _is_over_columns(call: _Call) -> bool:
    """Return True for a reduction or a softmax whose dimensions (the second argument) are not row dimensions."""
    args = call.operator.args
    if not _reads_rows_at(call, 0) or len(args) < 2:
        return False
    num_dimensions = len(call.refs[0].geometry[0])
    dimensions = [args[1]] if isinstance(args[1], int) else args[1] or [0]
    return all(dimension % num_dimensions >= call.splits[0] for dimension in dimensions)


def _is_norm(call: _Call) -> bool:
    """Return True for a norm over the last dimensions, whose sizes are the second argument."""
    if not _reads_rows_at(call, 0):
        return False
    return len(call.operator.args[1]) <= len(call.refs[0].geometry[0]) - call.splits[0]


_CHECKS: dict[str, Callable[[_Call], bool]] = {
    **dict.fromkeys(PRODUCTS, _is_product),
    **dict.fromkeys(("mean", "sum", "amax", "var_mean", "var", "softmax", "log_softmax"), _is_over_columns),
    **dict.fromkeys(("native_layer_norm", "fused_rms_norm"), _is_norm),
    **dict.fromkeys(("to_copy", "copy", "native_dropout", "empty_like", "bernoulli"), _is_pointwise),
}
"""For each operator name, a function that returns True if a call of the operator is row-wise. Operators that torch
tags as pointwise are not listed."""
