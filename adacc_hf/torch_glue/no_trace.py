"""Runs of a model that are no part of training, and leave no trace in it: a profile's, and those of the gradient check.

Also what torch's checkpoint takes to run a block twice while its state changes once.
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
from adacc_hf.torch_glue.states import RandomStates
from adacc_hf.torch_glue.tensors import leaves_below, without_gradient_hooks


class Tables:
    """Entries that runs make: tensors without gradient where there was none, or a smaller one, as rotary tables are.

    They stay until the last run, since training makes them in its first step, and finds them in all others. Afterwards
    tables alone stay, which are made once and then only read; a count that begins with None is put back.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, Any], tuple[Any, list[int]]] = {}
        """The first value that was made, and its versions, by dict and name."""
        self._others: set[tuple[int, Any]] = set()
        """What a later run has changed."""
        self.has_copies = False
        """Whether copies of tensors on the CPU stand in the places of those that runs replace."""
        self.is_closed = False
        """Whether the last run is over."""

    def of(self, now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
        """Entries of `now` that stay."""
        kept = {}
        for name, value in now.items():
            first_value = before.get(name)
            if not self.is_closed and first_value is not None and _is_another(value, first_value):
                # A copy, which is freed where a run puts another one in its place, as in training.
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
        """Where runs have made something."""
        return frozenset(self._found)


def _is_another(now: Any, before: Any) -> bool:
    """Return True if a run has put another plain tensor of the same form in the place of `before`."""
    if type(now) is not torch.Tensor or type(before) is not torch.Tensor or now is before:
        return False
    is_alike = (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return is_alike and not now.requires_grad and not before.requires_grad


def _made_tensors(now: Any, before: Any) -> list[torch.Tensor]:
    """The tensors of `now` if it may be a table in the place of `before`."""
    if isinstance(now, (tuple, list)) and before is None:
        tensors = [item for item in now if isinstance(item, torch.Tensor) and not item.requires_grad]
        return tensors if len(tensors) == len(now) else []
    is_new = before is None or (isinstance(before, torch.Tensor) and before.shape != getattr(now, "shape", None))
    return [now] if is_new and isinstance(now, torch.Tensor) and not now.requires_grad else []


# Calls of a block that torch's checkpoint runs again in backward.

STILL = 2
"""Calls of a block that must change no state before its larger tensors are copied no more, only checked."""

_num_still: WeakKeyDictionary[nn.Module, tuple[int, list[bool]]] = WeakKeyDictionary()
"""Calls in a row in which a block changed nothing, and its modules' training flags then."""


@contextmanager
def state_before(block: nn.Module | None, *given: Any) -> Iterator[list[ModelState]]:
    """A list that has, once this is left, the state before of what a call of `block` changed; empty if nothing.

    `given` are the called function and its arguments. Raises UnrestorableError if it cannot be put back.
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
    """A context that puts back, when it is left, what runs of a model in it have changed.

    That is the state within reach of `roots`, the random generators, the gradients of all parameters found there, and
    which of them want one. What waits for gradients (hooks of DeepSpeed, of optimizers that step in backward) does not
    hear of those made inside. Tables stay: to make them again would take other operators than later runs had. Raises
    UnrestorableError for what cannot be put back.
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
        """Put state and generators back now, so that each run does the same; return where tables stay."""
        self._first_states.restore()
        self._state.restore(self._tables)
        if self._tables.has_copies:
            with CpuMemoryMeter():  # which sees go only what one of them saw come
                self._state.restore(self._tables)
        return self._tables.names()

    def has_drawn(self) -> bool:
        """Return True if a default generator has moved since the last run started."""
        return self._first_states.have_moved()

    def draw_on(self) -> None:
        """Put state back now, and let this and all later runs start from the generators as they are now."""
        self._first_states = self._take_random_states()
        self._state.restore(self._tables)

    def keep_gradients_of(self, outputs: Iterable[torch.Tensor]) -> None:
        """Have the gradients of all leaves that a backward from `outputs` reaches put back too."""
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
