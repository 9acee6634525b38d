"""Memory of what came last, so that a long run takes no more of it than a short one."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def note_latest(noted: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Put `key` last, and forget the first if there are more than `most`."""
    noted[key] = value
    noted.move_to_end(key)
    if len(noted) > most:
        noted.popitem(last=False)
