"""Restoration of a model's state after extra runs, such as those of a profile or the gradient check (`NoTrace`).

`record_state_changes` detects the state that one call of a block changes. It is needed for torch's checkpoint, which
runs a block twice, although the block's state must change only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.torch_glue.memory import CpuMemoryMeter
from adacc_hf.torch_glue.model_state import LARGEST_COPY, SMALL_COPY, ModelState
from adacc_hf.torch_glue.private import unwritten_originals, version_of
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.second_run import measuring
from adacc_hf.torch_glue.state_kinds import is_capturing
from adacc_hf.torch_glue.tensors import gradient_leaves, without_gradient_hooks


class Tables:
    """Registry of tables: dict entries that runs of a model fill with tensors, such as cached rotary embeddings.

    A dict entry is a table if a run put tensors without gradient into it, and before that run the entry was absent,
    None or a tensor of a different shape. Tables are not restored between runs, because training too fills tables in
    the first step and reads the tables in later steps. After the last run, a table stays if it was filled once and then
    only read. An entry that later runs change, such as a counter that starts at None, is restored.
    """

    def __init__(self) -> None:
        self._first_values: dict[tuple[int, Any], tuple[Any, list[int]]] = {}
        """For each table: (value of the dict entry when first filled, versions of the value's tensors at that time).
        The keys are (id of the dict, name of the entry)."""
        self._changed_keys: set[tuple[int, Any]] = set()
        """Tables that a later run has changed, as (id of the dict, name of the entry)."""
        self.has_copies = False
        """True if `retained_entries` has put copies in place of some tensors on the CPU."""
        self.is_closed = False
        """True after the last of the model's extra runs has ended."""

    def retained_entries(self, now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries that the dict `now` must keep when the dict is restored to `before`, its copy from before
        the run.

        - Tables: the entries that runs fill with tensors (see the class).
        - Entries of Transformers' hooks that collect hidden states.
        - A copy of the earlier tensor for each tensor that the run has replaced, unless the last run has ended.
        """
        retained = {}
        for name, value in now.items():
            value_before = before.get(name)
            if is_capturing(name, value):
                retained[name] = value
                continue
            if not self.is_closed and value_before is not None and _is_tensor_replaced(value, value_before):
                # The next run replaces the copy, and so frees memory at the same moment as in training.
                retained[name] = value_before.clone()
                self.has_copies |= value_before.device.type == "cpu"
            tensors = _table_tensors(value, value_before)
            if not tensors:
                continue
            key, versions = (id(now), name), [version_of(tensor) for tensor in tensors]
            is_new = key not in self._first_values
            first_value, first_versions = self._first_values.setdefault(key, (value, versions))
            if first_value is not value or first_versions != versions:
                self._changed_keys.add(key)
            if not self.is_closed or not (is_new or key in self._changed_keys):
                retained[name] = value
        return retained

    def names(self) -> frozenset[tuple[int, Any]]:
        """Return (id of the dict, name of the entry) of all tables."""
        return frozenset(self._first_values)


def _is_tensor_replaced(now: Any, before: Any) -> bool:
    """Return True if a run has replaced the plain tensor `before` by another of the same shape, dtype and device."""
    if type(now) is not torch.Tensor or type(before) is not torch.Tensor or now is before:
        return False
    has_same_form = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return has_same_form and not now.requires_grad and not before.requires_grad


def _table_tensors(now: Any, before: Any) -> list[torch.Tensor]:
    """Return the tensors of a dict entry if the entry may be a table (`Tables`) that a run of the model has filled,
    else []. `now` is the value of the entry after the run, and `before` is the value before the run."""
    if isinstance(now, (tuple, list)) and before is None:
        tensors = [item for item in now if isinstance(item, torch.Tensor) and not item.requires_grad]
        return tensors if len(tensors) == len(now) else []
    is_new = before is None or (isinstance(before, torch.Tensor) and before.shape != getattr(now, "shape", None))
    return [now] if is_new and isinstance(now, torch.Tensor) and not now.requires_grad else []


# State changes by calls that torch's checkpoint repeats in backward.

UNCHANGED_CALLS = 2
"""Number of consecutive calls of a block without a change of state after which snapshots no longer copy the block's
larger tensors, but only detect their changes."""

_num_unchanged: WeakKeyDictionary[nn.Module, tuple[int, list[bool]]] = WeakKeyDictionary()
"""By block: number of consecutive calls that changed no state, and training flags of the block's modules at these
calls."""


@contextmanager
def record_state_changes(block: nn.Module | None, *call: Any) -> Iterator[list[ModelState]]:
    """Detect the state of `block`, and of `call` (the called function and its arguments), that changes in the `with`
    block.

    Yield a list. At the end of the context, the list receives snapshots with the earlier values of all state that has
    changed. Raise UnrestorableError if a change cannot be undone.
    """
    changes: list[ModelState] = []
    flags = [] if block is None else [module.training for module in block.modules()]
    num_unchanged, flags_before = (0, flags) if block is None else _num_unchanged.get(block, (0, flags))
    is_unchanged = num_unchanged >= UNCHANGED_CALLS and flags == flags_before
    block_state = ModelState([block], SMALL_COPY if is_unchanged else LARGEST_COPY)
    call_state = ModelState(call, SMALL_COPY)
    yield changes
    changes += [part for part in (block_state.changed(), call_state.changed()) if part is not None]
    if block is not None:
        _num_unchanged[block] = (0 if changes else num_unchanged + 1), flags


# Runs outside training.


class NoTrace(AbstractContextManager["NoTrace"]):
    """Context manager for runs of a model outside training, which leave no trace in the model's state.

    At the end of the `with` block, the state that the runs changed is restored.

    The state includes everything reachable from `roots` (`ModelState`), the random generators, and `grad` and
    `requires_grad` of all reachable parameters. Hooks that run in backward, such as DeepSpeed's or hooks of optimizers
    that step in backward, are not called inside the block. Tables that the runs fill, such as cached rotary embeddings,
    stay filled (`Tables`). If they were emptied, the next run would fill them again, with operators that other runs do
    not call. Raise UnrestorableError for a change that cannot be undone.
    """

    def __init__(
        self, roots: Iterable[Any], take_random_states: Callable[[], RandomStates], largest_copy: int = LARGEST_COPY
    ) -> None:
        self._state = ModelState(roots, largest_copy)
        self._state.watch_parameters()
        self._take_random_states = take_random_states
        self._random_states = self._first_states = take_random_states()
        self._tables = Tables()
        self._gradients = [(leaf, leaf.grad, leaf.requires_grad) for leaf in self._state.leaves]
        self._stack = ExitStack()

    def __enter__(self) -> NoTrace:
        for leaf, gradient, _ in self._gradients:
            if gradient is not None:
                leaf.grad = None
        self._stack.enter_context(without_gradient_hooks(self._state.leaves, self._state.backward_hooks))
        self._stack.enter_context(unwritten_originals)
        self._stack.enter_context(measuring())
        self._stack.enter_context(torch.enable_grad())
        return self

    def start_over(self) -> frozenset[Any]:
        """Restore the model's state and the random generators before the next run, so that all runs compute the same
        results. Return the names of the model's tables.

        A table is a dict entry that a run has filled with tensors, such as rotary embeddings. Tables are not restored
        (see `Tables`). A name is (id of the dict, name of the entry).
        """
        self._first_states.restore()
        self._state.restore(self._tables)
        if self._tables.has_copies:
            with CpuMemoryMeter():  # a later meter counts the free of a copy only if its allocation was recorded
                self._state.restore(self._tables)
        return self._tables.names()

    def has_drawn(self) -> bool:
        """Return True if numbers were drawn from a default generator since the last run started."""
        return self._first_states.have_advanced()

    def continue_random_states(self) -> None:
        """Restore the model's state before the next run, but not the random generators.

        Later runs start from the present states of the generators.
        """
        self._first_states = self._take_random_states()
        self._state.restore(self._tables)

    def protect_gradients_of(self, outputs: Iterable[torch.Tensor]) -> None:
        """Set aside the gradients of all leaf tensors into which a backward from `outputs` accumulates.

        The gradients are restored at the end of this context.
        """
        protected_ids = {id(leaf) for leaf, _, _ in self._gradients}
        leaves = [leaf for leaf in gradient_leaves(outputs) if id(leaf) not in protected_ids]
        self._gradients += [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
        self._stack.enter_context(without_gradient_hooks(leaves))
        for leaf in leaves:
            leaf.grad = None

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        self._stack.close()
        self._tables.is_closed = True
        try:
            self._state.restore(self._tables)
        except UnrestorableError:
            if error is None:
                raise
        finally:
            for leaf, gradient, requires_grad in self._gradients:
                leaf.grad = gradient
                if leaf.requires_grad is not requires_grad:
                    leaf.requires_grad_(requires_grad)
            self._random_states.restore()
