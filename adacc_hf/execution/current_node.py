"""Which node of autograd's graph runs now.

torch's engine knows that of its own backward only. A backward that calls the nodes itself, as that over tensors without
memory does, says so here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_called: ContextVar[Any] = ContextVar("adacc_hf_called_node", default=None)


def current_node() -> Any:
    """The node whose backward runs in this thread, or None outside of any backward."""
    node = torch._C._current_autograd_node()
    return _called.get() if node is None else node


@contextmanager
def calling(node: Any) -> Iterator[None]:
    """While open, `node` is called by hand: unless torch's engine runs one inside, it is the current one."""
    token = _called.set(node)
    try:
        yield
    finally:
        _called.reset(token)
