"""LoopHooks: hooks on model and optimizer that notify a session of forwards and optimizer steps in a user's own
loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.adapt.policy_checks import ALL_BLOCKS, refuse_uncovered
from adacc_hf.adapt.run_state import STATE_STEPS, RunState
from adacc_hf.run.policy_handle import remove_policy
from adacc_hf.torch_glue.compat import CHECKPOINTING
from adacc_hf.torch_glue.distributed import is_sharded
from adacc_hf.torch_glue.memory import component_optimizers
from adacc_hf.torch_glue.model_hook import ModelHook, by_name
from adacc_hf.torch_glue.private import is_transformed

log = logging.getLogger(__name__)

OUTSIDE = (
    "Adacc: the first micro-batch ended with a forward and without gradients, so backward runs outside of its context, "
    "where no step's memory is measured: call loss.backward() and optimizer.step() within session.step(batch), and "
    "with gradient accumulation loss.backward() within session.micro_batch(batch)"
)
OTHER_MODEL = (
    "Adacc: the optimizer that AdaccSession was given updates no parameter of the model, so the session does not see "
    "when the model is updated: make AdaccSession(model, optimizer) with the optimizer of this model's parameters"
)
NO_FORWARD = (
    "a step without a forward of the model in train mode, with gradients on and outside of torch.func (%s) runs under "
    "no policy, has no budget, and is not counted"
)


class LoopHooks:
    """Hooks that call a run's current phase when the model is called on a micro-batch and when the optimizer steps."""

    def __init__(self, run: RunState) -> None:
        self.is_on = False
        """True within a micro-batch."""
        self.num_forwards = 0
        """Number of forwards in the current step that run in train mode with gradients enabled."""
        self.has_warned = False
        """True after a warning that the loop calls backward, or an optimizer, that the session cannot see."""
        self._run = run
        self._batch: Any = None
        self._hooks: list[Any] = []
        self._optimizer: Any = None
        """The session's optimizer, if the hooks observe it."""
        self._others: WeakSet[Any] = WeakSet()
        """Other optimizers that have updated parameters of the model."""

    def begin(self, watches_optimizer: bool = True) -> None:
        """Register the hooks. If `watches_optimizer` is False, an adapter must send the optimizer's events itself."""
        model = self._run.model
        self._hooks = [
            model.register_forward_pre_hook(ModelHook(self._forward_begins), with_kwargs=True),
            model.register_forward_hook(ModelHook(self._forward_ends)),
        ]
        if watches_optimizer:
            self._optimizer, any_begins = self._run.optimizer, WeakMethod(self._any_begins)
            # Weak, because a session that is never closed must not keep its model alive.
            of_all = register_optimizer_step_pre_hook(lambda optimizer, *_: (call := any_begins()) and call(optimizer))
            finalize(self, of_all.remove)
            self._hooks += [
                of_all,
                self._optimizer.register_step_pre_hook(self._optimizer_begins),
                self._optimizer.register_step_post_hook(self._optimizer_ends),
            ]

    def begin_micro_batch(self, batch: Any = None) -> None:
        """Record that a micro-batch on `batch` begins, or is tried again."""
        self.is_on, self._batch = True, batch

    def end_micro_batch(self) -> None:
        """Record that a micro-batch has ended. Warn if the first one had no backward."""
        self.is_on = False
        run = self._run
        if self._optimizer is None or run.num_steps or run.has_stepped or not self.num_forwards:
            return
        trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        has_backward = run.profiler.has_inner_steps or is_sharded(run.model) or _have_gradients(trained)
        if trained and not has_backward:
            self._warn(OUTSIDE)

    def remove(self) -> None:
        """Remove the hooks from the model and the optimizer. Further calls have no effect."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._batch, self.is_on = [], None, False

    def _is_training(self, module: nn.Module) -> bool:
        """Return True if a call of the model, `module`, is part of a micro-batch, and is not transformed."""
        return self.is_on and module.training and torch.is_grad_enabled() and not is_transformed()

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_training(module):
            return
        self.num_forwards += 1
        inputs = self._batch if isinstance(self._batch, Mapping) else by_name(module, args, kwargs)
        self._run.phase.begin_forward({} if inputs is None else inputs)

    def _forward_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_training(module):
            self._run.phase.note_loss(getattr(output, "loss", None), None)

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        self._run.has_stepped = True
        if self.num_forwards:  # else a closure calls the model
            self._run.phase.begin_optimizer_step()
        if self._run.num_steps == 0 and not _have_gradients(_parameters(optimizer)):
            self._warn_of_other_model()

    def _any_begins(self, optimizer: Any) -> None:
        """Count the memory of `optimizer`, which is about to step, if it is another optimizer of the model."""
        if optimizer is self._optimizer or optimizer in self._others or not self._is_of_model(optimizer):
            return
        self._others.add(optimizer)
        self._run.optimizer, self._run.num_without_state = WeakSet((self._optimizer, *self._others)), STATE_STEPS
        self._warn_of_other_model()

    def _warn_of_other_model(self) -> None:
        if not self._is_of_model(self._optimizer):
            self._warn(OTHER_MODEL)

    def _is_of_model(self, optimizer: Any) -> bool:
        parameters = {id(parameter) for parameter in self._run.model.parameters()}
        return any(id(parameter) in parameters for parameter in _parameters(optimizer))

    def _warn(self, text: str) -> None:
        self.has_warned = True
        self._run.warn_once(text)

    def _optimizer_ends(self, *_: Any) -> None:
        self._run.phase.end_optimizer_step()
        self.has_trained()

    def has_trained(self) -> bool:
        """Return True if the step has called the model for training, or if the hooks are not registered. Warn if not,
        with the probable cause. An update without a forward ends a run that requires a policy for all blocks."""
        if self.num_forwards or not self._hooks:
            return True
        run = self._run
        run.phase.abandon_step()
        cause = "of the very model that the session was given" if run.model.training else "it is in eval mode"
        if run.has_stepped and run.config.on_uncovered == "error":
            remove_policy(run.model)  # detaches the session
            refuse_uncovered(run.config, ALL_BLOCKS, NO_FORWARD % cause, run.loop.how_to_train)
        run.warn_once(f"Adacc: {NO_FORWARD}. To avoid this, {run.loop.how_to_train}", cause)
        return False


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    groups = [group for member in component_optimizers(optimizer) for group in member.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _have_gradients(parameters: list[Any]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, or `model` itself if it is not wrapped.

    Raises TypeError if `model` is not a torch.nn.Module, and ValueError for nn.DataParallel.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has type {type(model).__name__}: give AdaccSession(model, optimizer) a torch.nn.Module")
    if isinstance(model, DataParallel):
        raise ValueError(
            "nn.DataParallel calls one block from several threads, which AdaccSession does not support: use "
            "DistributedDataParallel (torchrun, accelerate launch), or one device"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


def unwrapped_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer of a user's loop inside Accelerate's wrapper, or `optimizer` itself if it is not wrapped.

    Hooks that are registered on the wrapper are not called. Raises TypeError if there is no torch.optim.Optimizer.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return unwrapped_optimizer(inner)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer has type {type(optimizer).__name__}, which is not a torch.optim.Optimizer: pass the optimizer "
            f"that the loop steps. The budget includes its state, and its step ends a training step"
        )
    return optimizer


def warn_of_checkpointing(model: nn.Module, memory_budget: str | float | int) -> None:
    """Warn, before a policy is applied, if checkpointing is on in `model`: TRL, LLaMA-Factory and ms-swift set it."""
    if getattr(model, f"is_{CHECKPOINTING}", False):
        log.warning(
            "Adacc: gradient checkpointing is on in the model: a policy replaces checkpointing. The policy's peak may "
            "be higher than the peak of checkpointing, within memory_budget=%r. Set a smaller memory_budget to save "
            "more memory, and switch checkpointing off to avoid this warning: %s=False in the arguments of the Trainer "
            "or of TRL, disable_gradient_checkpointing in LLaMA-Factory, --gradient_checkpointing false in ms-swift, "
            "model.%s_disable() elsewhere",
            memory_budget,
            CHECKPOINTING,
            CHECKPOINTING,
        )
