"""What a Trainer counts while it computes losses: figures that it logs later.

A profile calls `compute_loss` some times more than training does. Trainers of preferences and rewards gather their
metrics there, and users log theirs, which must be those of training alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer


@contextmanager
def keep_figures(trainer: Trainer | None) -> Iterator[None]:
    """While open the attributes of `trainer` may change; then they are as before, and what dicts and lists held too.

    Until then nothing is logged either.
    """
    if trainer is None:
        yield
        return
    put_back = _keeping_dict(vars(trainer))
    trainer.log = _log_nothing
    try:
        yield
    finally:
        put_back()


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `Trainer.log`."""


def _keeping(found: Any) -> Callable[[], None] | None:
    """What puts the content of a dict back, dicts in it included, or of a list; None for anything else."""
    if isinstance(found, dict):
        return _keeping_dict(found)
    if isinstance(found, (list, deque)):
        items = list(found)

        def put_back() -> None:
            found.clear()
            found.extend(items)

        return put_back
    return None


def _keeping_dict(found: dict[Any, Any]) -> Callable[[], None]:
    items = dict(found)
    inner = [keeping for keeping in map(_keeping, items.values()) if keeping is not None]

    def put_back() -> None:
        for name in [name for name in found if name not in items]:
            del found[name]
        found.update(items)
        for again in inner:
            again()

    return put_back
