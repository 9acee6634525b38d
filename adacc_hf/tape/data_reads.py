"""Data that a block reads into Python. Other data may run other operators, so the block's tape is not trusted (rule
R8).

For example, attention over images of several sizes splits its tokens at lengths that it reads from an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from adacc_hf.torch_glue.private import TensorBase, schema_of
from adacc_hf.torch_glue.watchers import Watchers

_METHODS = ("tolist", "numpy")
"""Tensor methods that read data into Python without an operator, so that dispatch modes do not see the read."""
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

NoteRead = Callable[[torch.Tensor, str], None]


@dataclass(frozen=True, slots=True)
class Read:
    """Record that Python read the data of a value on the tape, or that the data decided the size of a tensor."""

    value: int
    by: str
    """Name of the operator or tensor method that read the data."""

    def __str__(self) -> str:
        return f"{self.by} reads data into Python or makes a size that depends on data"


def deciding_tensors(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors among `args` whose data determines the shape of the operator's result, or a Python number that
    the operator returns.

    `func` is the ATen operator. For most operators, the list is empty. For `item` and `nonzero`, the list contains one
    tensor.
    """
    if not _TAGS.intersection(func.tags):
        return []
    if schema_of(func).name == "aten::index":  # only a mask among the indices decides the size
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if schema_of(func).name == "aten::masked_select":
        return [args[1]]
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _patch_methods() -> Callable[[], None]:
    """Patch `Tensor.tolist` and `Tensor.numpy` to report calls to a callback of the thread, and return a function that
    removes the patch. A torch function mode would make torch.compile recompile parts of a block."""
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
"""Context manager `watched_reads(note)`. Inside the `with` block, `note(tensor, method name)` is called each time this
thread converts a tensor to a list or a numpy array."""
