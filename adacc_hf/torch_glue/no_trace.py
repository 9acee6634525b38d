"""Extra runs of a model, by a profile or the gradient check, after which its state is put back.

The same for torch's checkpoint, which runs a block twice while its state may change once.
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
from adacc_hf.torch_glue.private import version_of
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.state_kinds import is_capturing
from adacc_hf.torch_glue.tensors import leaves_below, without_gradient_hooks


class Tables:
    """Dict entries that extra runs fill with tensors that need no gradient, as rotary tables are.

    An entry counts if it was absent or None before, or a tensor of another shape. All such entries stay until the last
    run is over, since training fills them in its first step and finds them in all others. Afterwards only those stay
    that were filled once and then only read. A count that begins with None is put back.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, Any], tuple[Any, list[int]]] = {}
        """The first new value and the versions of its tensors, by the dict's id and the name."""
        self._others: set[tuple[int, Any]] = set()
        """Entries that a later run has changed."""
        self.has_copies = False
        """Whether `of` has put copies in the places of tensors on the CPU."""
        self.is_closed = False
        """Whether the last run is over."""

    def of(self, now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of `now` that stay."""
        kept = {}
        for name, value in now.items():
            first_value = before.get(name)
            if is_capturing(name, value):
                kept[name] = value
                continue
            if not self.is_closed and first_value is not None and _is_another(value, first_value):
                # The next run replaces the copy, and so frees memory where training frees it.
                kept[name] = first_value.clone()
                self.has_copies |= first_value.device.type == "cpu"
            tensors = _made_tensors(value, first_value)
            if not tensors:
                continue
            key, found = (id(now), name), (value, [version_of(tensor) for tensor in tensors])
            is_new = key not in self._found
            first = self._found.setdefault(key, found)
            if first[0] is not value or first[1] != found[1]:
                self._others.add(key)
            if not self.is_closed or not (is_new or key in self._others):
                kept[name] = value
        return kept

    def names(self) -> frozenset[tuple[int, Any]]:
        """Return (id of the dict, name) of all entries that runs have filled."""
        return frozenset(self._found)


def _is_another(now: Any, before: Any) -> bool:
    """Return True if a run has put another plain tensor of the same form in the place of `before`."""
    if type(now) is not torch.Tensor or type(before) is not torch.Tensor or now is before:
        return False
    is_alike = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return is_alike and not now.requires_grad and not before.requires_grad


def _made_tensors(now: Any, before: Any) -> list[torch.Tensor]:
    """Return the tensors of `now` if it may be a table in the place of `before`, else []."""
    if isinstance(now, (tuple, list)) and before is None:
        tensors = [item for item in now if isinstance(item, torch.Tensor) and not item.requires_grad]
        return tensors if len(tensors) == len(now) else []
    is_new = before is None or (isinstance(before, torch.Tensor) and before.shape != getattr(now, "shape", None))
    return [now] if is_new and isinstance(now, torch.Tensor) and not now.requires_grad else []


# Calls of a block that torch's checkpoint runs again in backward.

STILL = 2
"""Calls without a change of state after which a block's larger tensors are no longer copied, only checked."""

_num_still: WeakKeyDictionary[nn.Module, tuple[int, list[bool]]] = WeakKeyDictionary()
"""Calls in a row in which a block changed no state, and the training flags of its modules then."""


@contextmanager
def state_before(block: nn.Module | None, *given: Any) -> Iterator[list[ModelState]]:
    """Yield a list that gets, when the context is left, the earlier state of all that a call of `block` has changed.

    `given` are the called function and its arguments. Raises UnrestorableError if a change cannot be put back.
    """
    changed: list[ModelState] = []
    flags = [] if block is None else [module.training for module in block.modules()]
    num_still, flags_before = (0, flags) if block is None else _num_still.get(block, (0, flags))
    is_still = num_still >= STILL and flags == flags_before
    own = ModelState([block], SMALL_COPY if is_still else LARGEST_COPY)
    others = ModelState(given, SMALL_COPY)
    yield changed
    changed += [part for part in (own.changed(), others.changed()) if part is not None]
    if block is not None:
        _num_still[block] = (0 if changed else num_still + 1), flags


# Runs that are no part of training.


class NoTrace(AbstractContextManager["NoTrace"]):
    """Context that puts back, when it is left, the state that runs of a model in it have changed.

    This covers the state within reach of `roots` (`ModelState`), the random generators, and for all parameters found
    there `grad` and `requires_grad`. Hooks on gradients, as of DeepSpeed or of optimizers that step in backward, are
    not called inside. Tables stay (`Tables`), since a run that fills them takes other operators. Raises
    UnrestorableError for a change that cannot be put back.
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
        self._stack.enter_context(without_gradient_hooks(self._state.leaves))
        self._stack.enter_context(torch.enable_grad())
        return self

    def start_over(self) -> frozenset[Any]:
        """Put state and generators back now, so that each run does the same. Return the names of the tables."""
        self._first_states.restore()
        self._state.restore(self._tables)
        if self._tables.has_copies:
            with CpuMemoryMeter():  # a meter counts the free of a tensor only if it saw the allocation
                self._state.restore(self._tables)
        return self._tables.names()

    def has_drawn(self) -> bool:
        """Return True if a default generator has moved since the last run started."""
        return self._first_states.have_moved()

    def draw_on(self) -> None:
        """Put state back now. This and all later runs start from the present states of the generators."""
        self._first_states = self._take_random_states()
        self._state.restore(self._tables)

    def keep_gradients_of(self, outputs: Iterable[torch.Tensor]) -> None:
        """Put back the gradients of all leaves too that a backward from `outputs` reaches."""
        known = {id(leaf) for leaf, _, _ in self._gradients}
        found = [leaf for leaf in leaves_below(outputs) if id(leaf) not in known]
        self._gradients += [(leaf, leaf.grad, leaf.requires_grad) for leaf in found]
        self._stack.enter_context(without_gradient_hooks(found))
        for leaf in found:
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
            for leaf, gradient, wants_gradient in self._gradients:
                leaf.grad = gradient
                if leaf.requires_grad is not wants_gradient:
                    leaf.requires_grad_(wants_gradient)
            self._random_states.restore()
