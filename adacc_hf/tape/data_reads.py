"""Data that a block reads into Python: the tensors whose elements decide which operators run (rule R8).

Attention over images of several sizes splits its tokens at lengths that it reads from an argument. Calls with the same
lengths run the same operators, so that such data can be a part of a call's key, as shapes are. A tape is not trusted if
the data follows from anything else: hidden states, parameters, random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from adacc_hf.tape.call_inputs import Args, Kwargs, argument_at
from adacc_hf.tape.replay import closure
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.private import TensorBase, schema_of, version_of
from adacc_hf.torch_glue.tensors import runs_on_parts
from adacc_hf.torch_glue.watchers import Watchers

MOST_NUMBERS = 64
"""Whole numbers in a tensor for them to count as sizes: where each image of a batch ends, say."""
MAX_READ_BYTES = 1 << 16
"""Largest argument that is compared at each call: reading 64 KiB takes some 10 us, a hundredth of a small block."""
_METHODS = ("tolist", "numpy")
"""Ways into Python that run no operator, so that no dispatch mode sees them."""
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

NoteRead = Callable[[torch.Tensor, str], None]
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
    if schema_of(func).name == "aten::index":  # which depends on masks only; numbers are looked up
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if schema_of(func).name == "aten::masked_select":
        return [args[1]]
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _patch_methods() -> Callable[[], None]:
    """Have tensors' methods tell the watcher of their thread; return what undoes that.

    A torch function mode would see them too, and would have what torch.compile made of a block's parts made again.
    """
    before = {method: torch.Tensor.__dict__.get(method) for method in _METHODS}

    def watched_method(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note = _READS.current()
            if note is not None:
                note(tensor, f"Tensor.{method}")
            return original(tensor, *args, **kwargs)

        return call

    def undo() -> None:
        for method, function in before.items():
            if function is None:
                delattr(torch.Tensor, method)
            else:
                setattr(torch.Tensor, method, function)

    for method, function in before.items():
        setattr(torch.Tensor, method, watched_method(method, function or getattr(TensorBase, method)))
    return undo


_READS = Watchers[NoteRead](_patch_methods)
watched_reads = _READS.watching
"""While open, a function is called with (tensor, method) where this thread turns a tensor into lists or arrays."""


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


def data_at(path: Sequence[Any], args: Args, kwargs: Kwargs) -> Data | None:
    """The data of the argument at `path`; None if this call has no such tensor, or one that nobody compares."""
    try:
        return data_of(argument_at(path, args, kwargs))
    except (LookupError, TypeError):
        return None


def data_of(tensor: Any) -> Data | None:
    """The tensor's elements in their order; None for floats, for what is large, and for what ranks divide.

    Not its whole storage, whose end may be what was in memory before: `unique` allocates for the worst case.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return None
    if runs_on_parts(type(tensor)) or tensor.numel() * tensor.itemsize > MAX_READ_BYTES:
        return None
    if tensor.device.type == "cpu" or tensor.is_inference():
        return _elements_of(tensor)
    # Every block of a model is given the same tensor: the host waits for the device once, not in each of them.
    version = version_of(tensor)
    known = _seen.get(tensor)
    if known is None or known[0] != version:
        known = _seen[tensor] = (version, _elements_of(tensor))
    return known[1]


_seen = WeakTensorKeyDictionary()
"""Data of tensors on other devices, and which version of the tensor had them."""


def _elements_of(tensor: torch.Tensor) -> Data:
    elements = tensor.detach().cpu().contiguous().numpy()
    are_sizes = tensor.dtype is not torch.bool and elements.size <= MOST_NUMBERS
    return tuple(elements.ravel().tolist()) if are_sizes else elements.tobytes()
