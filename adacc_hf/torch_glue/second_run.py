"""Calls under torch's checkpoint, and comparison of their second run, in backward, with the first run.

torch's checkpoint assumes that a second run gives the saved tensors of the first. It does not if a number, hook or
adapter that the block reads was changed before backward. The second run also ends at the last saved tensor, which may
get its elements only afterwards (RReLU's noise: https://github.com/pytorch/pytorch/issues/193671). In both cases torch
computes wrong gradients without a message. So in each block's first checkpointed call, the second run is complete, and
each saved tensor must have the bits of the first run. In later calls, the tensors' last rows are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from adacc_hf.artifacts.errors import BLOCK_CLASSES_HINT, CheckpointMismatchError, UnrestorableError
from adacc_hf.kernels._layout import is_dense
from adacc_hf.torch_glue.block_state import BlockState, changes_in_place, report_change
from adacc_hf.torch_glue.private import (
    num_dispatch_modes,
    outer_hooks,
    tree_leaves,
    version_of,
    viewed_tensor,
    without_modes,
)
from adacc_hf.torch_glue.rng_state import RandomStates
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


def comparison(block: nn.Module, has_same_inputs: bool, repeats_code: bool) -> RunComparison | None:
    """Return what compares the runs of a checkpointed call, or None if other inputs or a traced graph run again.
    The graph's run is compared inside a dispatch mode."""
    if _is_measuring.get():
        return None
    is_whole = not _may_end_early.get(block, False)
    may_differ = repeats_code or num_dispatch_modes() > 0  # a mode may change operators, and be gone in backward
    is_partial = has_same_inputs and may_differ and block not in _varying
    return RunComparison(block, is_whole, has_same_inputs) if is_whole or is_partial else None


def may_end_early(block: nn.Module) -> bool:
    """Return True if the second run of a call of `block` gives the same bits if it ends at the last saved tensor."""
    return _may_end_early.get(block, _is_measuring.get())


def keyword_arguments(fn: Any) -> dict[str, Any]:
    """Return the keyword arguments that are bound in `fn`, a call of a block."""
    return fn.keywords if isinstance(fn, partial) else {}


SecondCall = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Type of a function that returns (function, arguments) for the second run of a checkpointed forward."""


def checkpoint_call(
    block: nn.Module,
    fn: Callable[..., Any],
    *args: Any,
    hold: Callable[[], SecondCall] | None = None,
    has_same_inputs: bool = True,
    is_held: bool = False,
    repeats_code: bool = True,
) -> Any:
    """Run `fn(*args)`, a call of `block`, under torch's checkpoint. In backward, the call runs a second time, and must
    save the tensors of the first run (`comparison`).

    For the second run, buffers and attributes that the first run changed (`BlockState`) and Python's and numpy's
    generators get their earlier values. If the first call changes other state, such as a list, this call and all later
    ones run once. If a later call is the first that does so, raise UnrestorableError, unless `is_held`: then the caller
    keeps the call's tensors until it has asked `changes_in_place`.

    If `hold` is given, `hold()` is called after the first run, and the returned `SecondCall` stays alive in place of
    `fn` and `args`. Set `has_same_inputs` to False if it decodes lossy payloads, and `repeats_code` to False if it runs
    a traced graph. torch's hooks are removed even if `fn` raises: before torch 2.13 they would stay active.
    """
    if repeats_code and changes_in_place(block):
        return fn(*args)
    errors: list[BaseException] = []
    has_begun = False
    python_states, state = RandomStates(), BlockState(block, (args, keyword_arguments(fn)))
    states_to_restore: list[BlockState | RandomStates] = []
    # torch keeps `run` until backward. The call is in a list, so that the result of `hold` can replace it.
    calls: list[SecondCall] = [lambda: (fn, args)]

    def run_once() -> Any:
        function, arguments = calls[0]()
        return function(*arguments) if compared is None else compared.run(partial(function, *arguments))

    def run(*_: torch.Tensor) -> Any:
        nonlocal has_begun
        if has_begun:  # in backward, or in `torch.autograd.grad` inside the block
            with ExitStack() as stack:
                for states in states_to_restore:
                    stack.enter_context(states.temporarily_restored())
                # If backward runs under autocast, autocast's cache would otherwise outlive this call.
                stack.callback(torch.clear_autocast_cache)
                return run_once()
        has_begun = True
        try:
            return run_once()
        except BaseException as error:
            errors.append(error)
            return None

    compared = comparison(block, has_same_inputs, repeats_code)
    # torch's checkpoint saves the generator states of its arguments' devices.
    leaves = tree_leaves((args, keyword_arguments(fn)))
    devices = dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    arguments = [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]
    with set_checkpoint_early_stop(may_end_early(block)):
        result = checkpoint(run, *arguments, use_reentrant=False)
    if errors:
        raise errors.pop()
    if python_states.have_advanced():  # else they are freed: 23 KiB per block
        states_to_restore.append(python_states)
    lost = state.find_changes(repeats_code)
    if state.changed or state.written:
        states_to_restore.append(state)
    if compared is not None and compared.is_whole:
        compared.end_first_run(keeps_tensors=lost is not None)
    elif lost is not None and not (is_held or _is_measuring.get()):
        raise UnrestorableError(
            f"forward of block class {type(block).__name__} changes {lost} in place, but did not in its first call, "
            f"and there is no copy to restore it from, while torch's checkpoint runs the block again in backward: "
            f"assign a new value to the attribute, change it from the first step on, or, {BLOCK_CLASSES_HINT}"
        )
    if lost is not None:
        report_change(block, lost)
    if hold is not None:
        calls[0] = hold()
    return result


class RunComparison:
    """Comparison of what the two runs of one checkpointed call of `block` save. `run(fn)` returns `fn()` in both.

    If `is_whole`, all bits are compared, and the first run's tensors are kept until `end_first_run`. Otherwise, the
    last row of each tensor is compared, at next to no cost. If `has_same_inputs` is False (the second run decodes lossy
    payloads), other numbers in the second run are no error.
    """

    def __init__(self, block: nn.Module, is_whole: bool, has_same_inputs: bool = True) -> None:
        self._block, self.is_whole, self._has_same_inputs = block, is_whole, has_same_inputs
        self._has_begun = False
        self._first: list[Checksum | None] | None = None
        """Checksums of what the first run saved, None for a tensor that is not compared. None before its end."""
        self._may_end_early = True
        """False if the first run has saved a tensor before it had its last bits."""
        self._packed: list[_Packed] = []
        """Saved tensors of the first run, until `end_first_run`."""

    def run(self, fn: Callable[[], Any]) -> Any:
        hooks, is_first, self._has_begun = outer_hooks(), not self._has_begun, True
        assert hooks is not None  # those of torch's checkpoint
        pack, unpack = hooks
        saved: list[torch.Tensor | None] = []
        at_save: list[Checksum | None] = []  # in the second run, a tensor filled later may have its old bits

        has_ended = False

        def pack_noted(tensor: torch.Tensor) -> Any:
            nonlocal has_ended
            part = torch.Tensor.detach if self.is_whole else _bytes_of_last_row
            saved.append(part(tensor) if _is_compared(tensor) else None)
            has_ended = True  # by an exception, if a second run ends at its last tensor
            packed = pack(tensor)
            has_ended = False
            if not is_first or not self.is_whole:
                return packed
            at_save.extend(_checksums(saved[-1:]))
            self._packed.append(_Packed(packed, tensor))
            return self._packed[-1]

        def unpack_noted(packed: Any) -> torch.Tensor:
            if not isinstance(packed, _Packed):
                return unpack(packed)
            return unpack(packed.checkpointed) if packed.tensor is None else packed.unpack()

        try:
            with saved_tensors_hooks(pack_noted, unpack_noted):
                result = fn()
            has_ended = True
            return result
        finally:
            checksums: list[Checksum | None] = _checksums(saved) if self.is_whole else [_checksum_of_rows(saved)]
            saved.clear()  # autograd keeps `pack_noted`
            if is_first:
                self._first, self._may_end_early = checksums, all(map(_is_equal, at_save, checksums))
            elif has_ended and self._first is not None:  # else an error, or `torch.autograd.grad` inside the block
                self._compare(self._first, checksums)

    def end_first_run(self, keeps_tensors: bool) -> None:
        """Free the tensors that the first run saved, or keep them, so that no second run follows."""
        for packed in () if keeps_tensors else self._packed:
            packed.tensor = None
        self._packed = []

    def _compare(self, first: list[Checksum | None], second: list[Checksum | None]) -> None:
        """Raise CheckpointMismatchError if the second run saved other tensors than the first."""
        if len(first) != len(second):
            raise _mismatch(self._block, "saves other tensors")
        wrong = [number for number, pair in enumerate(zip(first, second, strict=True)) if not _is_equal(*pair)]
        if wrong and self._has_same_inputs:
            which = f" (saved tensor {wrong[0]} of {len(second)})" if self.is_whole else ""
            _report(self._block, f"gives other numbers{which}")
        if self.is_whole:
            _may_end_early[self._block] = self._may_end_early
            if not self._may_end_early:
                name = type(self._block).__name__
                log.info("Adacc: blocks of class %s run to their end under torch's checkpoint", name)


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


def _checksum_of_rows(rows: Iterable[torch.Tensor | None]) -> Checksum:
    compared = [row for row in rows if row is not None]
    with without_modes():
        return checksum_of_bytes(torch.cat([row.to(compared[0].device) for row in compared])) if compared else 0


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
