"""Rules for values that must not be recomputed, or not from lossily compressed inputs.

A decision is an index that an operator chose by comparing floating-point data: the number of each token's expert, or
the order of sorted rows. If two of the compared numbers are nearly equal, a replay whose inputs differ in one bit may
choose another index, and rows saved in one order would meet gradients in another. So decisions are never recomputed.
Booleans are: one differs only if a number is near the threshold, and then both branches give nearly equal results.

A statistic has one number per row of another tensor, such as the standard deviation of a norm. If a codec sets nearly
all of a row to 0, the recomputed deviation is wrong by orders of magnitude, and scales the gradient of the row. So
statistics of rows that are stored lossily are stored too. Those of recomputed rows are recomputed, because they must
match these rows.

Other values with a large error are found by a measurement in a block's profile (`price/codec_gradient_error.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

DEGRADED_ERROR = 0.25
"""Relative error above which the gradient of a block or an operator counts as degraded. INT4 causes about 0.1 (0.15
under eager attention). Errors grow from block to block, so the error of the model's gradient may be far larger."""


def decisions(
    operators: Iterable[tuple[Iterable[T], Iterable[T]]], data: Iterable[T], is_index: Callable[[T], bool]
) -> set[T]:
    """Return the results of those `operators` that compute indices from data. They must never be recomputed (rule R14).

    `operators` contains the (inputs, outputs) of each operator in order, `data` the floating-point values that no
    operator computes. An index that depends only on other indices or on decisions may be recomputed. Other results of
    the same operator, such as the scores that topk returns, have the order of the indices, and are included.

    Example: an expert's number is chosen from scores (value 1), the order of tokens is computed from the numbers:

    >>> decisions([((0,), (1,)), ((1,), (2,)), ((2,), (3,))], data=[0], is_index=lambda value: value >= 2)
    {2}
    """
    ordered, depends_on_data = set[T](), set(data)
    for inputs, outputs in operators:
        if not depends_on_data.isdisjoint(inputs):
            results = list(outputs)
            ordered.update(results if any(map(is_index, results)) else ())
            depends_on_data.update(value for value in results if not is_index(value))
    return ordered


def is_index(dtype: str, size: Sequence[Any]) -> bool:
    """Return True if a tensor of this dtype and size may contain indices.

    Integers of one byte are quantized codes or booleans. Unsigned integers, and tensors without dimensions, are states
    of random generators, which fused attention returns.
    """
    return len(size) > 0 and dtype in ("int16", "int32", "int64")


def is_statistic(size: Sequence[int]) -> bool:
    """Return True if a value of shape `size` contains one number per row of another tensor, such as the standard
    deviations of a norm."""
    return tuple(size[-1:]) == (1,)


def source_activations(
    value: int, reads: Callable[[int], Iterable[int]], is_activation: Callable[[int], bool]
) -> frozenset[int]:
    """Return the nearest activations from which a replay computes `value`: for a statistic, the tensor with its rows.
    `reads` returns the inputs of the operator that computes a value."""
    return frozenset(walk_back(reads(value), lambda v: None if is_activation(v) else reads(v))[0])


def walk_back(starts: Iterable[T], reads: Callable[[T], Iterable[T] | None]) -> tuple[dict[T, None], dict[T, None]]:
    """Walk a graph from `starts` towards the inputs. Return (nodes at which the walk ended, other visited nodes).

    Both are in the order of the visits. `reads(node)` returns the inputs of a node, or None to end the walk at this
    node. `reads` may leave out inputs that it has returned for another node.
    """
    ends: dict[T, None] = {}
    passed: dict[T, None] = {}
    pending = list(starts)
    while pending:
        current = pending.pop()
        if current in passed or current in ends:
            continue
        inputs = reads(current)
        if inputs is None:
            ends[current] = None
        else:
            passed[current] = None
            pending += inputs
    return ends, passed
