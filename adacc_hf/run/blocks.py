"""Installation of removable functions that run the calls of a model's blocks.

A GradientCheckpointingLayer of Transformers whose checkpointing flag is set passes its forward to a function: each
block gets a function object of its own. For classes in `AdaccConfig.block_classes`, the function wraps `forward`
instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from threading import RLock
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from adacc_hf.artifacts.call_names import call_name, calls_per_block
from adacc_hf.artifacts.errors import (
    BLOCK_CLASSES_HINT,
    CompiledBlockError,
    ConcurrentCallError,
    NestedHooksError,
    PolicyMismatchError,
)
from adacc_hf.run.block_search import find_blocks, inner_layers, refuse_adapters, refuse_wrappers
from adacc_hf.torch_glue.compat import (
    FLAG,
    FUNCTION,
    SETTER,
    Cache,
    GradientCheckpointingLayer,
    PreTrainedModel,
    block_of,
    checkpoint_call,
    drop_caching_warning,
    layerdrop_rates,
    only_reads_cache,
    without_caches,
)
from adacc_hf.torch_glue.dynamo import asking_function
from adacc_hf.torch_glue.model_hook import ModelHook
from adacc_hf.torch_glue.private import (
    eval_frame_callback,
    outer_hooks,
    transform_level,
    unwritten_originals,
)
from adacc_hf.torch_glue.zero3 import BlockGathering, gathers_inside

log = logging.getLogger(__name__)

_ABSENT = object()
_models_of: WeakKeyDictionary[Cache, WeakSet[nn.Module]] = WeakKeyDictionary()
"""Models that were called with a cache in training, and left it empty."""
_CALLS = ("forward", "__call__")
"""Prefixes of the names of functions in which layers test their checkpointing flag."""


class Strategy(Protocol):
    """Strategy for running the calls of a block while gradients are enabled: plainly, checkpointed, or under a plan."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of `block` and return the result of `fn(*args)`. `kwargs` is already bound in `fn`."""


@runtime_checkable
class WrappedStrategy(Strategy, Protocol):
    """Strategy that runs a block's calls under another one, and observes them."""

    inner: Strategy


class PlainStrategy:
    """Strategy that runs a block's forward unchanged."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args)


class CheckpointStrategy:
    """Strategy that runs a block under torch's own checkpoint, for example in the steps before the first policy."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint_call(fn, *args, block=block)


class TrainingFlag:
    """Replacement of a layer's checkpointing flag, so that Transformers calls the block function in training.

    To a block's call, the flag is true if gradients are enabled, so generate() uses the key-value cache even in train
    mode. To other code, it is as it was before the installation: TRL tests it, switches checkpointing off to generate,
    and restores it.
    """

    def __init__(self, was_on: bool = False) -> None:
        self.was_on = was_on
        """True if checkpointing was enabled before the installation."""

    def __bool__(self) -> bool:
        if torch.compiler.is_compiling():  # compiled code has no frames, and only blocks check the flag there
            return torch.is_grad_enabled()
        asker = asking_function()
        is_block = asker is None or asker.startswith(_CALLS)
        return torch.is_grad_enabled() if is_block else self.was_on


class BlockCall:
    """One call of a block in a step: its name, and the strategy that runs it."""

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name = name
        self.strategy = strategy

    def replace_strategy(self, strategy: Strategy) -> None:
        """Run the call under `strategy`. A `WrappedStrategy` stays around it: a policy may change within a step, and a
        measurement of the step's memory must not lose its observers."""
        if isinstance(self.strategy, WrappedStrategy):
            self.strategy.inner = strategy
        else:
            self.strategy = strategy


class BlockFunction:
    """Function around one block, which runs the block's calls under a strategy. A copy of the model runs plainly."""

    def __init__(self, name: str, block: nn.Module, strategy: Strategy, lock: Any = None) -> None:
        self.name = name
        self._lock = RLock() if lock is None else lock
        """Lock of the model, which a thread holds while it is inside a block."""
        self.block: nn.Module | None = block
        self.calls = [BlockCall(name, strategy)]
        """The block's calls in a step, in order."""
        self.num_calls = 0
        """Number of calls of the block so far with gradients enabled."""
        self._has_warned_of_transform = False
        self.next_call = 0
        """Index of the next call in the step, among `calls`."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self.block is None or not torch.is_grad_enabled() or self._has_no_storage(args):
            return fn(*args)
        if torch.compiler.is_compiling() or eval_frame_callback() not in (None, False):  # traced, or compiled code
            raise CompiledBlockError(
                f"block {self.name} runs inside a module that torch.compile compiles, where operators cannot be "
                f"recorded: compile only modules outside of the blocks or inside them (torch_compile=False in "
                f"TrainingArguments), or compile the whole model: with torch_compile=True and AdaccCallback, or with "
                f"backend='adacc' and without adacc_hf around it"
            )
        self.num_calls += 1
        if self.num_calls == 1 and gathers_inside(self.block):
            raise PolicyMismatchError(
                f"ZeRO 3 has divided the parameters of block {self.name} among ranks after the policy was applied: "
                f"apply the policy after deepspeed.initialize or accelerator.prepare"
            )
        if outer_hooks() is not None and not getattr(self.calls[0].strategy, "expects_outer_hooks", False):
            raise NestedHooksError(_describe_hooks(self.name, outer_hooks()))
        arguments = (*args, *fn.keywords.values()) if isinstance(fn, partial) else args
        if any(isinstance(argument, Cache) for argument in arguments) and not only_reads_cache(self.block):
            fn, args = without_caches(fn, args)
        if not self._lock.acquire(blocking=False):
            raise ConcurrentCallError(
                f"block {self.name} is called in one thread while another thread is inside a block of the same model, "
                f"so the calls of a step cannot be distinguished: train one model in one thread (a copy of it in "
                f"another), or without adacc_hf"
            )
        try:
            with unwritten_originals():
                return self._run_inside_hooks(fn, args)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise NestedHooksError(
                f"block {self.name} calls torch.func.grad, vjp or jacrev, which torch refuses inside the saved-tensor "
                f"hooks of a policy or a checkpoint: {BLOCK_CLASSES_HINT}"
            ) from error
        finally:
            self._lock.release()

    def _run_inside_hooks(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block's forward hooks, and between them its forward by the strategy. Transformers 5.17 passes the
        block's `__call__` as `fn`, which runs the hooks: the forward is then replaced during the call. Hooks must not
        be replayed, because FSDP2's gather the parameters before forward and free them afterwards."""
        call = fn.func if isinstance(fn, partial) else fn
        if getattr(call, "__func__", None) is not nn.Module.__call__:
            return self._run(fn, args)
        block = block_of(fn)
        assert block is not None  # `fn` calls a module
        forward, instance_forward = block.forward, block.__dict__.get("forward")

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._run(partial(forward, **kwargs), args)

        block.forward = replacement
        try:
            return fn(*args)
        finally:
            if instance_forward is None:
                del block.forward
            else:
                block.forward = instance_forward

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a call of the block under the strategy of this call in the step."""
        block = self.block
        assert block is not None  # checked in `__call__`
        kwargs = fn.keywords if isinstance(fn, partial) else {}
        result = self.calls[self.next_call].strategy.run(block, fn, args, kwargs)
        self.next_call = (self.next_call + 1) % len(self.calls)
        return result

    def _has_no_storage(self, args: tuple[Any, ...]) -> bool:
        """Return True if the tensors in `args` have no storage: on device "meta", or inside a torch.func transform."""
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return True
        is_transformed = transform_level() is not None
        if is_transformed and not self._has_warned_of_transform:
            self._has_warned_of_transform = True
            log.warning(
                "Adacc: block %s runs inside a torch.func transform (grad, vmap, jvp), whose tensors cannot be "
                "recorded: its calls there run plainly and save no memory",
                self.name,
            )
        return is_transformed

    def set_calls(self, number: int) -> None:
        """Set how many calls of the block a step has, and begin a step. Added calls get the first call's strategy."""
        self.next_call = 0
        names = [call_name(self.name, place) for place in range(len(self.calls) + 1, number + 1)]
        self.calls = [*self.calls, *(BlockCall(name, self.calls[0].strategy) for name in names)][:number]

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_function, (self.name,)


def _describe_hooks(block: str, hooks: Any) -> str:
    owner = getattr(hooks[0], "__self__", None)
    if (hooks[0].__module__ if owner is None else type(owner).__module__).startswith("adacc_hf."):
        return (
            f"block {block} runs inside a block to which another policy of adacc_hf is applied: call remove() of that "
            f"policy's handle before applying a policy to the model or a part of it, or use handle.replace(policy)"
        )
    return (
        f"block {block} runs inside another pair of saved-tensor hooks (the model's own gradient checkpointing, an "
        f"outer checkpoint, selective checkpointing, or activation offloading): autograd passes a tensor to only one "
        f"pair; switch the other pair off (gradient_checkpointing=False, activation_offloading=False, FSDP "
        f"activation_checkpointing=False) or train without adacc_hf"
    )


def _refuse_keys(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if `model` gets a key-value cache that contains keys, or would in plain training."""
    trains = model.training and torch.is_grad_enabled()
    for cache in (argument for argument in (*args, *kwargs.values()) if isinstance(argument, Cache)):
        models = _models_of.setdefault(cache, WeakSet())
        if model in models or (trains and cache.get_seq_length() > 0):
            raise ValueError(
                f"{type(model).__name__} gets past_key_values that contain keys (prefix tuning, or a text trained in "
                f"segments): replay cannot preserve a cache, and training without it would give other results; train "
                f"without adacc_hf, or without the cache (prompt tuning and LoRA need none)"
            )
        if trains:
            models.add(model)


def _inert_function(name: str) -> BlockFunction:
    """Return the function of a copied or unpickled model, which runs the block plainly."""
    function = BlockFunction(name, nn.Identity(), PlainStrategy())
    function.block = None
    return function


class Installation:
    """Functions around the blocks of a model, installed until `remove`, and again if other code switches checkpointing
    off and on.

    Raise NoBlocksError if the model has no block, and NestedHooksError if a checkpoint wrapper is around or inside one.
    """

    def __init__(self, model: nn.Module, block_classes: tuple[str, ...] | None = None) -> None:
        self.model = model
        blocks = find_blocks(model, block_classes)
        refuse_wrappers(model)
        refuse_adapters(model)
        lock = RLock()
        self.blocks = {name: BlockFunction(name, block, PlainStrategy(), lock) for name, block in blocks}
        self.calls = {name: function.calls[0] for name, function in self.blocks.items()}
        """Each call of a block in a step, by name."""
        self._num_calls_before = dict.fromkeys(self.blocks, 0)
        self._undo: list[tuple[nn.Module, str, Any]] = []
        self._wraps_forward = block_classes is not None
        self._hooks: list[Any] = [BlockGathering(block) for _, block in blocks]
        for name, block in blocks:
            self._install(self.blocks[name], block)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._set(module, SETTER, Reinstaller(self, getattr(module, SETTER)))
                if not any(map(only_reads_cache, module.modules())):
                    self._hooks.append(module.register_forward_pre_hook(ModelHook(_refuse_keys), with_kwargs=True))
        self._restore_warning = drop_caching_warning()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The blocks by name. The dict is empty after `remove`."""
        return {name: function.block for name, function in self.blocks.items() if function.block is not None}

    def remove(self) -> None:
        """Remove the functions, and restore all attributes of the model. Further calls have no effect."""
        while self._undo:
            module, name, original = self._undo.pop()
            if name == "forward" and not isinstance(module.__dict__.get(name), WrappedForward):
                continue  # other code has replaced or removed it since
            if original is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = original
        for hook in self._hooks:
            hook.remove()
        for function in self.blocks.values():
            function.block = None
        self._restore_warning()

    def expect(self, calls: Iterable[str]) -> None:
        """Set the names of the block calls in a step, in call order and of every block, and begin a step."""
        calls = list(calls)
        if calls != list(self.calls):
            for block, number in calls_per_block(calls).items():
                self.blocks[block].set_calls(number)
            call_by_name = {call.name: call for block in self.blocks.values() for call in block.calls}
            self.calls = {name: call_by_name[name] for name in calls}
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: the next call of each block counts as its first call in the step."""
        for name, function in self.blocks.items():
            self._num_calls_before[name] = function.num_calls
            function.next_call = 0

    def reinstall(self, model: nn.Module) -> None:
        """Install the functions again, after other code has switched checkpointing on or off in `model`. `remove` then
        restores what the other code has set."""
        modules = set(model.modules())
        for place, (module, name, _) in enumerate(self._undo):
            value = module.__dict__.get(name, _ABSENT)
            if name in (FLAG, FUNCTION) and module in modules and not isinstance(value, (TrainingFlag, BlockFunction)):
                self._undo[place] = module, name, value
        for function in self.blocks.values():
            block = function.block
            if block is None or block not in modules:  # `block` is None if the functions were removed
                continue
            if self._wraps_forward and isinstance(block, GradientCheckpointingLayer):
                block.__dict__[FLAG] = False
            elif isinstance(block, GradientCheckpointingLayer):
                flag = block.__dict__.get(FLAG)
                was_on = flag.was_on if isinstance(flag, TrainingFlag) else bool(flag)
                block.__dict__[FLAG] = TrainingFlag(was_on)
                block.__dict__[FUNCTION] = function
            for inner in inner_layers(block):
                inner.__dict__[FLAG] = False

    def uncalled(self) -> list[str]:
        """Return the names of the blocks that were never called with gradients enabled, [] with layerdrop."""
        if layerdrop_rates(self.model):
            return []
        return [name for name, function in self.blocks.items() if function.num_calls == 0]

    def skipped_blocks(self) -> list[str]:
        """Return the names of the blocks not called with gradients in the last step, [] with layerdrop."""
        if layerdrop_rates(self.model):
            return []
        return [name for name, function in self.blocks.items() if function.num_calls == self._num_calls_before[name]]

    def _install(self, function: BlockFunction, block: nn.Module) -> None:
        """Install `function` on `block`: through its checkpointing flag, or around its forward."""
        for inner in inner_layers(block):  # would be checkpointed inside the block under any plan
            self._set(inner, FLAG, False)
        if not self._wraps_forward:
            self._set(block, FLAG, TrainingFlag(was_on=bool(getattr(block, FLAG, False))))
            self._set(block, FUNCTION, function)
            return
        if isinstance(block, GradientCheckpointingLayer):
            self._set(block, FLAG, False)
        own_forward = block.__dict__.get("forward")
        while isinstance(own_forward, WrappedForward):  # remove the wrapper of an earlier policy
            own_forward = own_forward.own_forward
        self._set(block, "forward", WrappedForward(function, block, own_forward))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        self._undo.append((module, name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value


class WrappedForward:
    """Replacement of `forward` for classes that the user names: calls the block function in train mode."""

    def __init__(self, function: BlockFunction, block: nn.Module, own_forward: Callable[..., Any] | None) -> None:
        self.function = function
        self.own_forward = own_forward
        """The `forward` that other code has set on the block itself, or None."""
        self._block = block

    @property
    def forward(self) -> Callable[..., Any]:
        """The block's present `forward`: its class, or the class's method, may be replaced during a run."""
        return type(self._block).forward.__get__(self._block) if self.own_forward is None else self.own_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.function.block
        if block is None or not block.training:
            return self.forward(*args, **kwargs)
        return self.function(partial(self.forward, **kwargs), *args)


class Reinstaller:
    """Replacement of a model's `_set_gradient_checkpointing` that installs the block functions again: TRL switches
    checkpointing off before reference forwards and on afterwards, which would drop them."""

    def __init__(self, installation: Installation, original: Callable[..., Any]) -> None:
        self.installation = installation
        self.original = original

    def __call__(self, enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        result = self.original(enable, *args, **kwargs)
        self.installation.reinstall(self.original.__self__)  # type: ignore[attr-defined]
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound_setter, (getattr(self.original, "__self__", None), SETTER)


def _bound_setter(model: Any, name: str) -> Any:
    return getattr(type(model), name).__get__(model)
