"""What no replay may make from numbers that a lossy codec changed: indices, statistics of rows, and what would be far
off.

Indices follow from numbers: which expert a token goes to, in which order rows are sorted. A replay that reads numbers
from a lossy codec may decide otherwise than forward did, where two were nearly equal: rows that forward saved in one
order would meet gradients in another. So no replay makes such indices, unless all that they follow from is exact.
Truths (a comparison's result) are recomputed: where they come out otherwise, a number was near the threshold, and what
they choose between is near too.

A statistic is one number for each row, such as a norm's deviation. A row of which a codec leaves next to nothing has a
deviation out of all proportion, and that one number scales all of its gradient. So where rows are stored with loss
their statistics are stored too. Where rows are recomputed themselves, statistics of the same rows suit them better.

What an `autograd.Function` of the user's own draws may depend on numbers too (an element is dropped by chance and by
size), and no operator shows which. Its results count as indices.

What else comes out far off is found by measuring, when a block is profiled (`price/codec_gradient_error.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

DEGRADED_ERROR = 0.25
"""Relative error from which compression is held to degrade a gradient, a block's or an operator's. INT4 leaves about
0.1 (0.15 under eager attention). Errors grow from block to block, so that a whole gradient may be off by far more than
that of any block."""


def index_values(
    operators: Iterable[tuple[Sequence[int], Sequence[int]]],
    is_index: Callable[[int], bool],
    coded: Collection[int],
    stored: Collection[int],
) -> frozenset[int]:
    """Values that no replay may make where those in `coded` are stored with loss.

    `operators` are, in order, the values that each reads and makes; `is_index` tells whether a value holds
    indices. What is made of an index that is not `stored` cannot be recomputed either (rule R14).
    """
    inexact, found = set(coded), set[int]()
    for inputs, made in operators:
        if any(value in found and value not in stored for value in inputs):
            found.update(made)
        elif not inexact.isdisjoint(inputs):
            found.update(filter(is_index, made))
            inexact.update(value for value in made if not is_index(value))
    return frozenset(found)


FUNCTIONS = "autograd_function"
"""Namespace of the operators that are `autograd.Function`s."""


def is_function(name: str) -> bool:
    """Whether an operator of that name is an `autograd.Function`."""
    return name.startswith(f"{FUNCTIONS}.")


def is_index(dtype: str) -> bool:
    """Whether a dtype is one of whole numbers; those of a byte are codes or truths."""
    return dtype.lstrip("u") in ("int16", "int32", "int64")


def is_statistic(size: Sequence[int]) -> bool:
    """Whether a value of this size has one number for each row."""
    return tuple(size[-1:]) == (1,)


def made_from(
    value: int, reads: Callable[[int], Iterable[int]], is_activation: Callable[[int], bool]
) -> frozenset[int]:
    """The activations that a replay starts from to make `value`: of a statistic, its rows.

    `reads` gives the values that the operator reads that makes one.
    """
    return frozenset(walk_back(reads(value), lambda v: None if is_activation(v) else reads(v))[0])


def upstream(value: int, reads: Callable[[int], Iterable[int]], is_activation: Callable[[int], bool]) -> frozenset[int]:
    """All activations that `value` is made from, near or far."""
    return frozenset(filter(is_activation, walk_back(reads(value), reads)[1]))


def walk_back(wanted: Iterable[T], reads: Callable[[T], Iterable[T] | None]) -> tuple[dict[T, None], dict[T, None]]:
    """(the ends, at which the walk goes no further; what it passes on the way), each once in the order found.

    `reads` gives what one is made of, which may leave out what it gave before; None for an end.
    """
    ends: dict[T, None] = {}
    passed: dict[T, None] = {}
    pending = list(wanted)
    while pending:
        current = pending.pop()
        if current in passed or current in ends:
            continue
        made_of = reads(current)
        if made_of is None:
            ends[current] = None
        else:
            passed[current] = None
            pending += made_of
    return ends, passed
