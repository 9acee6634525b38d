"""Data that a block reads into Python: tensors whose elements decide which operators run.

A call may run on a tape only if it runs the tape's operators (rule R8), so the data is compared too. For example,
attention over images of several sizes splits its tokens at lengths that it reads from an argument. Calls with equal
lengths run the same operators, so this data can be part of a call's key, like shapes. If the data comes from another
source (hidden states, parameters, random numbers), the record of the call, its tape, is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from adacc_hf.tape.inputs import Args, Kwargs, argument_at
from adacc_hf.tape.replay import closure
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.private import TensorBase, schema_of, version_of
from adacc_hf.torch_glue.tensors import runs_on_parts
from adacc_hf.torch_glue.watchers import Watchers

MOST_NUMBERS = 64
"""Maximum number of elements of an integer tensor whose elements are treated as sizes, such as the ends of a batch's
images."""
MAX_READ_BYTES = 1 << 16
"""Maximum size of an argument whose data is compared at each call. Reading 64 KiB takes about 10 us, about 1 % of a
small block's time."""
_METHODS = ("tolist", "numpy")
"""Tensor methods that read data into Python without an operator, so that dispatch modes do not see the read."""
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

NoteRead = Callable[[torch.Tensor, str], None]
Path = tuple[Any, ...]
Data = bytes | tuple[int, ...]
"""Type of the elements of a tensor in a call's key: a tuple for a few integers, else bytes."""


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
    """Patch `Tensor.tolist` and `Tensor.numpy` to report each call to a callback of the current thread.

    Return a function that removes the patch. A torch function mode would see the calls too, but torch.compile would
    then recompile compiled parts of a block.
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
"""Context manager `watched_reads(note)`. Inside the `with` block, `note(tensor, method name)` is called each time this
thread converts a tensor to a list or a numpy array."""


def data_behind_reads(
    tape: Tape, reads: Iterable[Read], arguments: Callable[[int], Iterable[tuple[Path, torch.Tensor]]]
) -> tuple[dict[Path, Data], Read | None]:
    """Return the data of the arguments on which `reads` depend, as a pair (data by path of the argument, None).

    If one of the reads depends on data that is not in an argument, return ({}, this read) instead.

    `arguments(value)` yields (path, tensor) of each argument that shares the storage of a value. The data of all these
    arguments is returned, because the block may have read any of them.
    """
    data_by_path: dict[Path, Data] = {}
    for read in reads:
        operators, leaves = closure(tape, read.value, lambda _: False)
        if not all(tape.operators[index].may_run_again for index in operators):
            return {}, read
        for leaf in leaves:
            is_unchanged_argument = tape.is_block_input(leaf) and not tape.values[leaf].overwritten
            data = {path: data_of(tensor) for path, tensor in arguments(leaf)} if is_unchanged_argument else {}
            if not data or None in data.values():
                return {}, read
            data_by_path |= data
    return data_by_path, None


def data_at(path: Sequence[Any], args: Args, kwargs: Kwargs) -> Data | None:
    """Return the data of the tensor argument at `path`.

    Return None if the call has no tensor at `path`, or if the tensor's data is not part of call keys (`data_of`).
    """
    try:
        return data_of(argument_at(path, args, kwargs))
    except (LookupError, TypeError):
        return None


def data_of(tensor: Any) -> Data | None:
    """Return the tensor's elements in order, as part of a call's key.

    Return None for floats, large tensors and tensors sharded among ranks.

    Elements of the storage that are not in `tensor` are left out, because they may be uninitialized. For example,
    `unique` allocates memory for the largest possible result.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return None
    if runs_on_parts(type(tensor)) or tensor.numel() * tensor.itemsize > MAX_READ_BYTES:
        return None
    if tensor.device.type == "cpu" or tensor.is_inference():
        return _elements_of(tensor)
    # Every block of a model gets the same tensor. The host should wait for the device once, not in each block.
    version = version_of(tensor)
    cached = _data_by_tensor.get(tensor)
    if cached is None or cached[0] != version:
        cached = _data_by_tensor[tensor] = (version, _elements_of(tensor))
    return cached[1]


_data_by_tensor = WeakTensorKeyDictionary()
"""Cached (version of the tensor, data) by tensor, for tensors that are not on the CPU."""


def _elements_of(tensor: torch.Tensor) -> Data:
    """Return the elements of a tensor on any device: a tuple for a few integers, else bytes."""
    elements = tensor.detach().cpu().contiguous().numpy()
    are_sizes = tensor.dtype is not torch.bool and elements.size <= MOST_NUMBERS
    return tuple(elements.ravel().tolist()) if are_sizes else elements.tobytes()
