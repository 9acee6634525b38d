"""Values of a model that a step outside training must leave unchanged: gradients, buffers, random generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.torch_glue.block_state import BlockState
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.private import BACKWARD_HOOKS, buffers_of, unwritten_originals, version_of
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.second_run import measuring
from adacc_hf.torch_glue.tensors import gradients_set_aside


@contextmanager
def _outside_training(module: nn.Module) -> Iterator[None]:
    """Set gradients of `module` aside, call no hooks in its backward, and compare no calls under torch's checkpoint."""
    hooks = [hooks for each in module.modules() for kind in BACKWARD_HOOKS if (hooks := vars(each)[kind])]
    with gradients_set_aside(module.parameters(), hooks), unwritten_originals(), measuring(), torch.enable_grad():
        yield


@contextmanager
def preserved_block(block: nn.Module, arguments: Any) -> Iterator[None]:
    """Restore the gradients and the state of `block` after the `with` block, in which its call runs again."""
    state = BlockState(block, arguments)
    with _outside_training(block):
        yield
    state.find_changes()
    state.restore()


class PreservedValues(AbstractContextManager["PreservedValues"]):
    """Context manager for steps of a model outside training, which preserve gradients, buffers and random generators.

    At its end, changed values are restored, `requires_grad` of parameters included. Hooks that run in backward are not
    called inside. A buffer that was replaced by one of another shape stays, such as a table that grew. Python state is
    not restored. Raise UnrestorableError if a forward changed a parameter in place.
    """

    def __init__(self, model: nn.Module, random_states: RandomStates) -> None:
        self._random_states = random_states
        self._model, parameters = model, list(model.parameters())
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._registers = [(buffers_of(module), dict(buffers_of(module))) for module in model.modules()]
        embeddings = [module for module in model.modules() if getattr(module, "max_norm", None) is not None]
        scaled = [parameter for module in embeddings for parameter in module.parameters(recurse=False)]
        copied = {id(t): t for t in [*model.buffers(), *scaled] if not (t.is_meta or t.is_inference())}
        self._copies = [(tensor, tensor.detach().clone()) for tensor in copied.values()]
        watched = [] if is_sharded(model) else [p for p in parameters if not p.is_inference()]
        self._versions = [(parameter, version_of(parameter)) for parameter in watched if id(parameter) not in copied]
        self._stack = ExitStack()

    def __enter__(self) -> PreservedValues:
        self._stack.enter_context(_outside_training(self._model))
        return self

    def start_over(self) -> None:
        """Restore the buffers and the random generators before the next step."""
        self._random_states.restore()
        self._restore_buffers()

    def set_gradients_aside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Also preserve the gradients of `leaves`, which need not be parameters of the model."""
        own = {id(parameter) for parameter, _ in self._flags}
        self._stack.enter_context(gradients_set_aside(leaf for leaf in leaves if id(leaf) not in own))

    def _restore_buffers(self) -> None:
        for register, before in self._registers:
            for name, buffer in before.items():
                present = register.get(name)
                if buffer is not None and present is not None and present.shape == buffer.shape:
                    register[name] = buffer
        for tensor, values in self._copies:
            if tensor.shape == values.shape:
                tensor.data.copy_(values)  # without a new version: a graph of the model may still have saved it

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        self._stack.close()
        self._restore_buffers()
        for parameter, requires_grad in self._flags:
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
        self._random_states.restore()
        changed = [leaf for leaf, version in self._versions if version_of(leaf) != version]
        if changed and error is None:
            raise UnrestorableError(
                f"forward changes a parameter of size {tuple(changed[0].shape)} in place, and there is no copy to "
                f"restore it from: change parameters outside of forward, in the training step, or train without "
                f"adacc_hf"
            )
