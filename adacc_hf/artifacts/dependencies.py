"""The walk from what is wanted back to what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


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
