"""Collectives that return after gloo's threads released the tensors, so that live bytes do not depend on timing."""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SECONDS = 120.0
"""Longest wait for a thread. It runs as soon as a core is free."""


def wait_for_threads() -> None:
    """Wait until all other threads of the process sleep, and so hold no tensors of collectives that have ended."""
    own, deadline = str(threading.get_native_id()), time.monotonic() + SECONDS
    while any(path.name != own and _is_running(path) for path in Path("/proc/self/task").iterdir()):
        assert time.monotonic() < deadline, f"a thread has run for {SECONDS} s"
        time.sleep(0.0001)


def _is_running(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return False


def settled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `collective` that waits until nobody but the caller refers to the tensors. Gloo's thread
    keeps references for a while after the collective has ended. A collective that returns a handle, or a new tensor,
    does not wait."""

    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in([*args, *kwargs.values()]))
        counts = [tensor._use_count() for tensor in tensors]
        result = collective(*args, **kwargs)
        deadline = time.monotonic() + SECONDS
        while result is None and [tensor._use_count() for tensor in tensors] != counts:
            assert time.monotonic() < deadline, f"a thread has kept tensors of {collective.__name__} for {SECONDS} s"
            time.sleep(0.0001)
        return result

    return run


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among `values`, including those in lists and tuples."""
    nested = (tensors_in(value) if isinstance(value, list | tuple) else [value] for value in values)
    return (value for value in itertools.chain.from_iterable(nested) if isinstance(value, torch.Tensor))
