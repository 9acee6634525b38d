"""Rules for values that must not be recomputed from lossily compressed inputs.

Some values contain indices, such as the number of each token's expert, or the order of sorted rows. These index values
are computed from floating-point numbers. If two of these numbers are nearly equal, a replay that reads a lossily
compressed tensor may choose another index than the forward. Rows saved in one order would then meet gradients in
another order. So indices are recomputed only from exact inputs. Boolean values (results of comparisons) are recomputed:
a boolean differs only if a number is near the threshold, and then both branches give nearly equal results.

A statistic is a tensor with one number per row of another tensor, such as the standard deviation of a norm. If a codec
sets nearly all of a row to 0, the recomputed deviation is wrong by orders of magnitude, and scales the whole gradient
of the row. So if the rows are stored lossily, their statistics are stored too. If the rows themselves are recomputed,
statistics of the recomputed rows are used, because the recomputed statistics match the recomputed rows.

Random numbers drawn by a user's `autograd.Function` may also depend on its input (an element's chance of being dropped
may depend on its magnitude), and no recorded operator shows this dependence. The outputs of such a Function count as
index values.

Other values with a large error are found by a measurement in a block's profile (`price/codec_gradient_error.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

DEGRADED_ERROR = 0.25
"""Relative error above which the gradient of a block or an operator counts as degraded by compression. INT4 causes
about 0.1 (0.15 under eager attention). Errors grow from block to block. The error of the model's whole gradient may
therefore be far larger than the error of each block."""


def index_values(
    operators: Iterable[tuple[Sequence[int], Sequence[int]]],
    is_index: Callable[[int], bool],
    lossy: Collection[int],
    stored: Collection[int],
) -> frozenset[int]:
    """Return the values of a block that contain indices and must not be recomputed if the values in `lossy` are stored
    lossily.

    Such indices are, for example, the numbers of the experts that a layer chose for each token. `operators` contains
    the (inputs, outputs) of each operator in order. `is_index` returns True for a value that contains indices. Indices
    that depend on lossily stored data are never replayed (rule R14), so replay can read one of the returned values only
    if it is in `stored`. If it is not in `stored`, all values computed from it are returned too.
    """
    inexact, forbidden = set(lossy), set[int]()
    for inputs, outputs in operators:
        if any(value in forbidden and value not in stored for value in inputs):
            forbidden.update(outputs)
        elif not inexact.isdisjoint(inputs):
            forbidden.update(filter(is_index, outputs))
            inexact.update(value for value in outputs if not is_index(value))
    return frozenset(forbidden)


FUNCTIONS = "autograd_function"
"""Prefix of the names of recorded operators that are an `autograd.Function`."""


def is_function(name: str) -> bool:
    """Return True if the operator `name` is an `autograd.Function`."""
    return name.startswith(f"{FUNCTIONS}.")


def is_index(dtype: str) -> bool:
    """Return True if a tensor of this dtype may contain indices.

    Integers of one byte do not count, because they are quantized codes or booleans.
    """
    return dtype.lstrip("u") in ("int16", "int32", "int64")


def is_statistic(size: Sequence[int]) -> bool:
    """Return True if a value of shape `size` contains one number per row of another tensor, such as the standard
    deviations of a norm."""
    return tuple(size[-1:]) == (1,)


def source_activations(
    value: int, reads: Callable[[int], Iterable[int]], is_activation: Callable[[int], bool]
) -> frozenset[int]:
    """Return the nearest activations from which a replay computes `value`.

    For a statistic, such as a norm's standard deviations, the result is the tensor whose rows the statistic describes.
    `reads` returns the inputs of the operator that computes a value.
    """
    return frozenset(walk_back(reads(value), lambda v: None if is_activation(v) else reads(v))[0])


def upstream_activations(
    value: int, reads: Callable[[int], Iterable[int]], is_activation: Callable[[int], bool]
) -> frozenset[int]:
    """Return all activations from which `value` is computed directly or indirectly."""
    return frozenset(filter(is_activation, walk_back(reads(value), reads)[1]))


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
