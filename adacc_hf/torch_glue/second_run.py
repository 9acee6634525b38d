"""Comparison of a checkpointed call's second run, in backward, with its first run.

torch's checkpoint assumes that a second run gives the saved tensors of the first. It does not if a number, hook or
adapter that the block reads was changed before backward. The second run also ends at the last saved tensor, which may
get its elements only afterwards (RReLU's noise: https://github.com/pytorch/pytorch/issues/193671). In both cases torch
computes wrong gradients without a message. So in each block's first checkpointed call, the second run is complete, and
each saved tensor must have the bits of the first run. In later calls, the tensors' last rows are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from adacc_hf.artifacts.errors import BLOCK_CLASSES_HINT, CheckpointMismatchError
from adacc_hf.kernels._layout import is_dense
from adacc_hf.torch_glue.private import outer_hooks, version_of, viewed_tensor, without_modes
from adacc_hf.torch_glue.tensors import Checksum, bytes_in_order, checksum_of_bytes, is_fake, is_plain, local_of
from adacc_hf.torch_glue.zero3 import saved_tensor, without_gathered_memory

log = logging.getLogger(__name__)

MOST_COPIED = 2**20  # bytes of a tensor with gaps that are copied together

_may_end_early: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""For each block that was compared: True if the second run may end at the last saved tensor."""
_varying: WeakSet[nn.Module] = WeakSet()  # blocks on GPUs whose operators give other bits each time
_is_measuring: ContextVar[bool] = ContextVar("_is_measuring", default=False)  # another thread may train meanwhile


@contextmanager
def measuring() -> Iterator[None]:
    """Compare no calls inside the `with` block, which measures their memory."""
    token = _is_measuring.set(True)
    try:
        yield
    finally:
        _is_measuring.reset(token)


def is_measuring() -> bool:
    """Return True inside `measuring`."""
    return _is_measuring.get()


def comparison(block: nn.Module | None, has_same_inputs: bool, repeats_code: bool) -> SecondRun | LastRows | None:
    """Return what compares the runs of a checkpointed call, or None if other inputs or a traced graph run again."""
    if block is None or _is_measuring.get():
        return None
    if not _may_end_early.get(block, False):
        return SecondRun(block, has_same_inputs)
    return LastRows(block) if has_same_inputs and repeats_code and block not in _varying else None


def may_end_early(block: nn.Module | None) -> bool:
    """Return True if the second run of a call of `block` gives the same bits if it ends at the last saved tensor."""
    return block is None or _may_end_early.get(block, _is_measuring.get())


class SecondRun:
    """Saved tensors of one checkpointed call of `block`. `run(fn)` returns `fn()` in the first and the second run. If
    `has_same_inputs` is False (the second run decodes lossy payloads), other numbers in the second run are no error."""

    def __init__(self, block: nn.Module, has_same_inputs: bool = True) -> None:
        self._block = block
        self._has_same_inputs = has_same_inputs
        self._expected: list[Checksum | None] | None = None
        """Checksums of the tensors that the first run saved. None before its end."""
        self._tensors: list[torch.Tensor | None] = []
        """Tensors that the present run has saved, None for tensors that are not compared."""
        self._at_save: list[Checksum | None] = []
        """Checksums when the first run saves each: in the second, a tensor filled later may have its old bits."""
        self._at_last: list[Checksum | None] = []
        """Checksums at the moment in which the second run saves its last tensor."""
        self._packed: list[_Packed] = []
        """Saved tensors of the first run, until `end_first_run`."""

    def run(self, fn: Callable[[], Any]) -> Any:
        hooks = outer_hooks()
        assert hooks is not None  # those of torch's checkpoint
        pack, unpack = hooks

        def pack_noted(tensor: torch.Tensor) -> _Packed:
            self._note(tensor)
            packed = _Packed(pack(tensor), tensor)
            if self._expected is None:
                self._packed.append(packed)
            return packed

        def unpack_compared(packed: _Packed) -> torch.Tensor:
            if packed.tensor is not None:
                return packed.unpack()
            try:
                tensor = unpack(packed.checkpointed)  # the first one runs the call again
            except CheckpointError as error:
                raise _mismatch(self._block, "saves other tensors") from error
            self._compare()
            return tensor

        with saved_tensors_hooks(pack_noted, unpack_compared):
            result = fn()
        if self._expected is None:
            self._expected = _checksums(self._tensors)
            self._tensors.clear()
        return result

    def end_first_run(self, keeps_tensors: bool) -> None:
        """Free the tensors that the first run saved, or keep them, so that no second run follows."""
        for packed in () if keeps_tensors else self._packed:
            packed.tensor = None
        self._packed = []

    def _note(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor.detach() if _is_compared(tensor) else None)
        if self._expected is None:
            self._at_save += _checksums(self._tensors[-1:])
        elif len(self._tensors) == len(self._expected):
            self._at_last = _checksums(self._tensors)

    def _compare(self) -> None:
        """Raise CheckpointMismatchError if the second run saved other tensors than the first."""
        tensors, self._tensors = self._tensors, []
        if not tensors or self._expected is None:
            return
        second = _checksums(tensors)
        pairs = zip(self._expected, second, strict=True)  # torch has compared the numbers of tensors
        wrong = [number for number, (first, again) in enumerate(pairs) if not _is_equal(first, again)]
        if wrong and self._has_same_inputs:
            _report(self._block, f"gives other numbers (saved tensor {wrong[0]} of {len(second)})")
        is_same = all(map(_is_equal, self._at_last, second)) and all(map(_is_equal, self._at_save, self._expected))
        if not is_same:
            log.info("Adacc: blocks of class %s run to their end under torch's checkpoint", type(self._block).__name__)
        _may_end_early[self._block] = is_same


class LastRows:
    """Last rows of the tensors that the runs of a checkpointed call save, as `SecondRun`, at next to no cost."""

    def __init__(self, block: nn.Module) -> None:
        self._block, self._has_begun = block, False
        self._first: Checksum | None = None

    def run(self, fn: Callable[[], Any]) -> Any:
        hooks, is_first, self._has_begun = outer_hooks(), not self._has_begun, True
        assert hooks is not None  # those of torch's checkpoint
        pack, unpack = hooks
        rows: list[torch.Tensor] = []

        def pack_noted(tensor: torch.Tensor) -> Any:
            if _is_compared(tensor):
                rows.append(_bytes_of_last_row(tensor))
            return pack(tensor)  # an exception ends the second run at the last tensor

        try:
            with saved_tensors_hooks(pack_noted, unpack):
                return fn()
        finally:
            with without_modes():
                total = checksum_of_bytes(torch.cat([row.to(rows[0].device) for row in rows])) if rows else 0
            rows.clear()  # autograd keeps `pack_noted`
            if is_first:
                self._first = total
            elif not _is_equal(self._first, total):
                _report(self._block, "gives other numbers")


class _Packed:
    """Saved tensor of a compared call: what torch's checkpoint stores, and the tensor itself until it may be freed."""

    __slots__ = ("checkpointed", "tensor", "version")

    def __init__(self, checkpointed: Any, tensor: torch.Tensor) -> None:
        self.checkpointed = checkpointed
        self.tensor: Any = without_gathered_memory(tensor)
        self.version = version_of(tensor)

    def unpack(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError("a saved tensor was changed in place after the forward: change it after backward")
        return saved_tensor(self.tensor)


def _mismatch(block: nn.Module, difference: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"block class {type(block).__name__}: torch's checkpoint runs a call a second time in backward, and this run "
        f"{difference}, so gradients would be wrong. A number, hook, adapter or context that the block uses was "
        f"changed between forward and backward, or an operator gives other bits each time. Change it back only after "
        f"backward, call torch.use_deterministic_algorithms(True), or leave the class out: {BLOCK_CLASSES_HINT}"
    )


def _report(block: nn.Module, difference: str) -> None:
    report_other_bits(_mismatch(block, difference), any(parameter.is_cuda for parameter in block.parameters()))
    _varying.add(block)


def report_other_bits(error: Exception, is_on_gpu: bool) -> None:
    """Raise `error`. On a GPU whose operators may give other bits each time, only log a warning."""
    if not is_on_gpu or torch.are_deterministic_algorithms_enabled():
        raise error
    log.warning("Adacc: %s", error)


def _is_equal(first: Checksum | None, second: Checksum | None) -> bool:
    return first is None or second is None or bool(first == second)


def _is_compared(tensor: torch.Tensor) -> bool:
    """Return False for parameters, whose memory wrappers such as FSDP free, and for tensors without plain memory."""
    base = viewed_tensor(tensor)
    base = tensor if base is None else base
    is_parameter = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
    if is_parameter or is_fake(tensor) or not is_plain(local_of(tensor)):
        return False
    has_bytes = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return has_bytes and tensor.numel() > 0


def _checksums(tensors: Iterable[torch.Tensor | None]) -> list[Checksum | None]:
    return [None if tensor is None else checksum(tensor) for tensor in tensors]


@torch.no_grad()
def _bytes_of_last_row(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    with without_modes():
        return local[(-1,) * (local.dim() - 1)].flatten().clone().view(torch.uint8)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> Checksum:
    """Return a checksum of the tensor's bytes that depends on their order. A tensor with gaps is copied in parts."""
    tensor = local_of(tensor)
    with without_modes(), torch.autocast(tensor.device.type, enabled=False):
        is_whole = tensor.dim() < 2 or not tensor.numel() or is_dense(tuple(tensor.shape), tensor.stride())
        parts = [tensor] if is_whole else tensor.split(max(1, MOST_COPIED // tensor[:1].nbytes))
        total: Checksum = 0
        for part in parts:
            total = total * 31 + checksum_of_bytes(bytes_in_order(part))
        return total
