"""What a block reads into Python: the tensors whose data decides which operators run (rule R8).

Attention over images of several sizes splits its tokens at lengths that it reads from an argument. Calls that are given
the same lengths run the same operators, so that such data can be part of what tells calls apart, as shapes are. What
follows from anything else - hidden states, parameters, random numbers - is no ground for a tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any

import torch

from adacc_hf.tapes.local_tensors import runs_on_parts
from adacc_hf.tapes.replay import closure
from adacc_hf.tapes.tape import Tape

MOST_NUMBERS = 64
"""Whole numbers in a tensor for them to count as sizes: where each image of a batch ends, say."""
MAX_READ_BYTES = 1 << 16
"""Largest argument that is compared at each call: reading 64 KiB takes some 10 us, a hundredth of a small block."""
_METHODS = ("tolist", "numpy")
"""Ways into Python that run no operator, so that no dispatch mode sees them."""
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Note = Callable[[torch.Tensor, str], None]
Path = tuple[Any, ...]
Data = bytes | tuple[int, ...]
"""Of a tensor: its elements, one by one where they are few whole numbers."""


@dataclass(frozen=True, slots=True)
class Read:
    """One value that was read into Python, or that decided a size, and by what."""

    value: int
    by: str

    def __str__(self) -> str:
        return f"{self.by} reads data into Python or makes a size that depends on data"


def deciding_tensors(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors whose data decides what an operator returns into Python, or its result's size."""
    if not _TAGS.intersection(func.tags):
        return []
    if func._schema.name == "aten::index":  # which depends on masks only; numbers are looked up
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if func._schema.name == "aten::masked_select":
        return [args[1]]
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


class _Watch:
    """One patch of torch's tensors for all threads that watch at the same time, each what it reads itself.

    A torch function mode would see it too, and would have what torch.compile made of a block's parts made again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._notes: dict[int, list[Note]] = {}
        """By thread; the innermost comes last. Dynamo, when it is first used, keeps the methods that it finds: outside
        they must find nothing here."""
        self._before: dict[str, Any] = {}

    def begin(self, note: Note) -> None:
        with self._lock:
            if not self._notes:
                self._before = {method: torch.Tensor.__dict__.get(method) for method in _METHODS}
                for method in _METHODS:
                    setattr(torch.Tensor, method, self._watching(method))
            self._notes.setdefault(get_ident(), []).append(note)

    def end(self) -> None:
        with self._lock:
            notes = self._notes[get_ident()]
            notes.pop()
            if not notes:
                del self._notes[get_ident()]
            if self._notes:
                return
            for method, function in self._before.items():
                if function is None:
                    delattr(torch.Tensor, method)
                else:
                    setattr(torch.Tensor, method, function)

    def _watching(self, method: str) -> Callable[..., Any]:
        original = self._before[method] or getattr(torch._C.TensorBase, method)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            notes = self._notes.get(get_ident())
            if notes:
                notes[-1](tensor, f"Tensor.{method}")
            return original(tensor, *args, **kwargs)

        return call


_WATCH = _Watch()


@contextmanager
def watched(note: Note) -> Iterator[None]:
    """While open, `note(tensor, method)` is called where this thread turns a tensor into lists or arrays."""
    _WATCH.begin(note)
    try:
        yield
    finally:
        _WATCH.end()


def judge(
    tape: Tape, reads: Iterable[Read], arguments: Callable[[int], Iterable[tuple[Path, torch.Tensor]]]
) -> tuple[dict[Path, Data], Read | None]:
    """(data of the arguments that `reads` follow from, by their paths; the first read that follows from more).

    `arguments(value)` has the arguments on the storage of a value, with their paths: a read may be of any of them.
    """
    found: dict[Path, Data] = {}
    for read in reads:
        operators, leaves = closure(tape, read.value, lambda _: False)
        if not all(tape.operators[index].may_run_again for index in operators):
            return {}, read
        for leaf in leaves:
            is_given = tape.is_block_input(leaf) and not tape.values[leaf].overwritten
            data = {path: data_of(tensor) for path, tensor in arguments(leaf)} if is_given else {}
            if not data or None in data.values():
                return {}, read
            found |= data
    return found, None


def data_of(tensor: Any) -> Data | None:
    """The tensor's elements in their order; None for floats, for what is large, and for what ranks divide.

    Not its whole storage, whose end may be what was in memory before: `unique` allocates for the worst case.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return None
    if runs_on_parts(type(tensor)) or tensor.numel() * tensor.itemsize > MAX_READ_BYTES:
        return None
    elements = tensor.detach().cpu().contiguous().numpy()
    are_sizes = tensor.dtype is not torch.bool and elements.size <= MOST_NUMBERS
    return tuple(elements.ravel().tolist()) if are_sizes else elements.tobytes()
