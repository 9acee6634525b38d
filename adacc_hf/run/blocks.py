"""Finding a model's transformer blocks, and putting a function around each of them that leaves no trace when removed.

The way in is Transformers' own: a GradientCheckpointingLayer whose flag is set hands its forward to a function. Each
block gets a function object of its own, so nothing has to be read out of what is passed in. Classes that the user names
in `AdaccConfig.block_classes` get the function around their `forward` instead, whatever became of it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from adacc_hf.artifacts.call_names import call_name, num_calls
from adacc_hf.artifacts.errors import CompiledBlockError, NestedHooksError, NoBlocksError, SeveralThreadsError
from adacc_hf.torch_glue.compat import (
    FLAG,
    FUNCTION,
    SETTER,
    CachingWarning,
    GradientCheckpointingLayer,
    PreTrainedModel,
    checkpointed,
    class_name,
    has_cache,
    has_filled_cache,
    is_checkpoint_wrapper,
    is_compiled_around,
    keeps_cache,
    keyword_arguments,
    layerdrop_rates,
    outer_hooks,
    run_inside_hooks,
    without_caches,
)
from adacc_hf.torch_glue.private import transform_level, tree_leaves

log = logging.getLogger(__name__)

_ABSENT = object()
_CALLS = ("forward", "__call__")
"""How the functions begin in which Transformers' layers and those of others ask for their flag."""


class Strategy(Protocol):
    """What is done with a block's forward while gradients are on."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `fn(*args)`; `kwargs` are the keyword arguments already bound in `fn`."""


class Plainly:
    """The strategy that changes nothing."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args)


class Checkpointed:
    """The strategy of full recomputation with torch's own checkpoint, for the steps before there is a policy."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpointed(fn, *args, block=block)


class WhileTraining:
    """A flag that is true within a block's call while gradients are on: generate() in train mode keeps its cache.

    To all who ask from elsewhere it says what the flag was: TRL asks whether a model is checkpointed before it
    generates, switches that off, and on again afterwards.
    """

    def __init__(self, was_on: bool = False) -> None:
        self.was_on = was_on
        """Whether others had switched checkpointing on."""

    def __bool__(self) -> bool:
        # Compiled code sees no frames; what asks there is a block.
        if torch.compiler.is_compiling() or sys._getframe(1).f_code.co_name.startswith(_CALLS):
            return torch.is_grad_enabled()
        return self.was_on


class LaterCall:
    """What carries the strategy of a block's second call in a step, or of a later one."""

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name = name
        self.strategy = strategy


class OneThread:
    """The thread that is within a call of a model's blocks."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def enter(self, block: str) -> int | None:
        """Note that this thread calls `block`; return what to `leave` with.

        Raises SeveralThreadsError while another thread is within a call.
        """
        before, own = self._ident, get_ident()
        if before not in (None, own):
            raise SeveralThreadsError(
                f"block {block} is called in one thread while another is within a block of the same model, and its "
                f"calls in a step could not be told apart: train one model in one thread (a copy of it in another), or "
                f"without adacc_hf"
            )
        self._ident = own
        return before

    def leave(self, before: int | None) -> None:
        """Note that the call has returned."""
        self._ident = before


class BlockFunction:
    """The function of one block. Picklable and copyable: a copy calls its block plainly."""

    def __init__(self, name: str, block: nn.Module, strategy: Strategy, thread: OneThread | None = None) -> None:
        self.name = name
        self._thread = thread or OneThread()
        self.block: nn.Module | None = block
        self.strategy = strategy
        """Of all its calls, but for those that have one of their own."""
        self.later: list[LaterCall] = []
        """Its second call in a step, and those after it."""
        self.num_calls = 0
        self._has_said_transformed = False
        self.step = StepCount()

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        if self.block is None or not torch.is_grad_enabled() or self._has_no_storage(args):
            return fn(*args)
        if is_compiled_around():
            raise CompiledBlockError(
                f"block {self.name} runs inside a module that torch.compile compiles, where no operator can be seen: "
                f"compile what stands beside the blocks or inside them only (torch_compile=False in "
                f"TrainingArguments), or compile the whole model: by torch_compile=True with AdaccCallback, or with "
                f"backend='adacc' and without adacc_hf around it"
            )
        self.num_calls += 1
        if outer_hooks() is not None and not getattr(self.strategy, "expects_outer_hooks", False):
            raise NestedHooksError(_describe_hooks(self.name, outer_hooks()))
        if has_cache(fn, args) and not keeps_cache(self.block):
            if has_filled_cache(self.block, fn, args):
                raise ValueError(
                    f"block {self.name} is given past_key_values that hold keys already (prefix tuning, or a text "
                    f"trained piece by piece): replay cannot keep a cache, and without it training would be another "
                    f"one; train without adacc_hf, or without the cache (prompt tuning and LoRA need none)"
                )
            fn, args = without_caches(fn, args)
        before = self._thread.enter(self.name)
        try:
            return run_inside_hooks(fn, args, self._run)
        finally:
            self._thread.leave(before)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        block = self.block
        assert block is not None  # `__call__` has seen to that
        if not self.later:
            return self.strategy.run(block, fn, args, keyword_arguments(fn))
        call = self.calls()[self.step.next_of(1 + len(self.later))]
        result = call.strategy.run(block, fn, args, keyword_arguments(fn))
        self.step.returned(result)
        return result

    def _has_no_storage(self, args: tuple[Any, ...]) -> bool:
        """Return True if tensors have nothing that a policy could store: on device "meta", and within torch.func."""
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return True
        is_transformed = transform_level() is not None
        if is_transformed and not self._has_said_transformed:
            self._has_said_transformed = True
            log.warning(
                "Adacc: block %s runs within a transform of torch.func (grad, vmap, jvp), whose tensors cannot be "
                "recorded: there it runs plainly, and saves no memory",
                self.name,
            )
        return is_transformed

    def calls(self) -> list[BlockFunction | LaterCall]:
        """What carries the strategy of each of its calls in a step."""
        return [self, *self.later]

    def set_later(self, number: int) -> None:
        """Have as many later calls in a step; a new one begins with the strategy of the first."""
        self.step.reset()
        names = [call_name(self.name, 2 + place) for place in range(number)]
        self.later = [*self.later, *(LaterCall(name, self.strategy) for name in names[len(self.later) :])][:number]

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, (self.name,)


def _describe_hooks(block: str, hooks: Any) -> str:
    """The message on a block that runs inside another pair of saved-tensor hooks."""
    owner = getattr(hooks[0], "__self__", None)
    if type(owner).__module__.startswith("adacc_hf."):
        return (
            f"block {block} runs inside a block that another policy of adacc_hf stores: a second one was applied to "
            f"the model, or to a part of it; call remove() of the first one's handle before, or handle.replace(policy)"
        )
    return (
        f"block {block} runs inside another pair of saved-tensor hooks (the model's own gradient checkpointing, an "
        f"outer checkpoint, selective checkpointing, or activation offloading): only one pair sees a tensor; switch "
        f"the other one off (gradient_checkpointing=False, activation_offloading=False, FSDP "
        f"activation_checkpointing=False) or train without adacc_hf"
    )


def _inert(name: str) -> BlockFunction:
    function = BlockFunction(name, nn.Identity(), Plainly())
    function.block = None
    return function


class Installation:
    """The functions around a model's blocks. Survives others who switch checkpointing off and on again.

    Raises NoBlocksError if there is no block, and NestedHooksError if a checkpoint wrapper stands around or inside one.
    """

    def __init__(self, model: nn.Module, block_classes: tuple[str, ...] | None = None) -> None:
        self.model = model
        blocks = find_blocks(model, block_classes)
        _refuse_wrappers(model)
        _refuse_prefix_tuning(model)
        thread = OneThread()
        self.blocks = {name: BlockFunction(name, block, Plainly(), thread) for name, block in blocks}
        self.functions: dict[str, BlockFunction | LaterCall] = {**self.blocks}
        """What carries the strategy of each call in a step, by its name; at first of one call of each block."""
        self._calls_before = dict.fromkeys(self.blocks, 0)
        self.on_step: Callable[[], object] | None = None
        """If set, what is called when a step begins."""
        self._undo: list[tuple[nn.Module, str, Any]] = []
        self._wraps_forward = block_classes is not None
        for name, block in blocks:
            self._install(self.blocks[name], block)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._set(module, SETTER, Reinstaller(self, getattr(module, SETTER)))
        self._caching_warning = CachingWarning(_is_on_for_us)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The blocks themselves, while their functions are around them."""
        return {name: function.block for name, function in self.blocks.items() if function.block is not None}

    def remove(self) -> None:
        """Put everything back as it was. Harmless when called again."""
        while self._undo:
            module, name, before = self._undo.pop()
            if before is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
        for function in self.blocks.values():
            function.block = None
            function.step.reset()
        self.on_step = None  # which holds a profile's batch, in a cycle that only the garbage collector would end
        self._caching_warning.remove()

    def expect(self, calls: Iterable[str]) -> None:
        """Have `functions` hold these calls, in this order, all of all blocks; a step begins with the next call."""
        calls = list(calls)
        if calls != list(self.functions):
            for block, number in num_calls(calls).items():
                self.blocks[block].set_later(number - 1)
            known = {call.name: call for block in self.blocks.values() for call in block.calls()}
            self.functions = {name: known[name] for name in calls}
        self.begin_step()

    def begin_step(self) -> None:
        """Let the next call of each block be its first in a step."""
        if self.on_step is not None:
            self.on_step()
        for name, function in self.blocks.items():
            self._calls_before[name] = function.num_calls
            if function.later:
                function.step.reset()

    def reinstall(self) -> None:
        """Set the blocks' functions again after somebody else has set theirs."""
        for function in self.blocks.values():
            block = function.block
            if block is None:  # the functions were removed
                continue
            if self._wraps_forward and isinstance(block, GradientCheckpointingLayer):
                block.__dict__[FLAG] = False
            elif isinstance(block, GradientCheckpointingLayer):
                block.__dict__[FLAG] = WhileTraining(was_on=True)
                block.__dict__[FUNCTION] = function
            for inner in _inner_layers(block):
                inner.__dict__[FLAG] = False

    def uncalled(self) -> list[str]:
        """Blocks whose function was never called with gradients on; none with layerdrop, where chance decides."""
        if layerdrop_rates(self.model):
            return []
        return [name for name, function in self.blocks.items() if function.num_calls == 0]

    def left_out(self) -> list[str]:
        """Blocks that the last step did not call with gradients on, as text calls no vision tower.

        With layerdrop, where chance decides, none.
        """
        if layerdrop_rates(self.model):
            return []
        return [name for name, function in self.blocks.items() if function.num_calls == self._calls_before[name]]

    def _install(self, function: BlockFunction, block: nn.Module) -> None:
        for inner in _inner_layers(block):  # checkpointed inside a block, they would be recomputed under any plan
            self._set(inner, FLAG, False)
        if not self._wraps_forward:
            self._set(block, FLAG, WhileTraining(was_on=bool(getattr(block, FLAG, False))))
            self._set(block, FUNCTION, function)
            return
        if isinstance(block, GradientCheckpointingLayer):
            self._set(block, FLAG, False)
        forward = block.forward
        while isinstance(forward, WrappedForward):  # of a policy that was applied before: the last one runs the block
            forward = forward.forward
        self._set(block, "forward", WrappedForward(function, forward))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        self._undo.append((module, name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value


def _is_on_for_us(layer: nn.Module) -> bool:
    """Whether `layer` takes itself to be checkpointed since a function stands around it, and for no other reason."""
    flag = layer.__dict__.get(FLAG)
    return isinstance(flag, WhileTraining) and not flag.was_on


class WrappedForward:
    """A block's forward that goes through its function while the block trains."""

    def __init__(self, function: BlockFunction, forward: Callable[..., Any]) -> None:
        self.function = function
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.function.block
        if block is None or not block.training:
            return self.forward(*args, **kwargs)
        return self.function(partial(self.forward, **kwargs), *args)


class Reinstaller:
    """Stands for a model's `_set_gradient_checkpointing`; when others use it, our functions are set again after it.

    TRL switches checkpointing off around reference forwards and on again, which would drop our functions silently.
    """

    def __init__(self, installation: Installation, original: Callable[..., Any]) -> None:
        self.installation = installation
        self.original = original

    def __call__(self, enable: bool = True, *args: Any, **kwargs: Any) -> Any:
        result = self.original(enable, *args, **kwargs)
        if enable:
            self.installation.reinstall()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound_setter, (getattr(self.original, "__self__", None), SETTER)


def _bound_setter(model: Any, name: str) -> Any:
    return getattr(type(model), name).__get__(model)


def find_blocks(model: nn.Module, block_classes: tuple[str, ...] | None = None) -> list[tuple[str, nn.Module]]:
    """(module path, module) of every outermost block, in module order. Raises NoBlocksError if there is none."""
    wanted = set(block_classes or ())
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_block = class_name(module) in wanted if wanted else isinstance(module, GradientCheckpointingLayer)
        if is_block and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    if not found:
        looked_for = f"block_classes={block_classes!r}" if wanted else "a GradientCheckpointingLayer of Transformers"
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        likely = tuple(dict.fromkeys(class_name(layer) for layers in lists for layer in layers)) or ("MyLayer",)
        raise NoBlocksError(
            f"{type(model).__name__} has no repeated blocks: no module is {looked_for}; name the class of its layers "
            f"with AdaccConfig(block_classes={likely!r})"
        )
    return found


def _inner_layers(block: nn.Module) -> list[nn.Module]:
    """What Transformers would checkpoint by itself inside `block`, such as the layers of Swin's stages."""
    inner = [module for module in block.modules() if module is not block]
    return [module for module in inner if isinstance(module, GradientCheckpointingLayer)]


def _refuse_prefix_tuning(model: nn.Module) -> None:
    """Raise ValueError for prefixes in a cache: Transformers takes caches from blocks that a function stands around."""
    adapters = [getattr(module, "peft_config", None) for module in model.modules()]
    configs = [config for each in adapters if isinstance(each, dict) for config in each.values()]
    kinds = [str(getattr(config, "peft_type", None)).rpartition(".")[2] for config in configs]
    if refused := [kind for kind in kinds if kind in ("PREFIX_TUNING", "CARTRIDGE")]:
        raise ValueError(
            f"{refused[0].lower().replace('_', ' ')} hands its prefix to the blocks as a key-value cache, which "
            f"neither replay nor gradient checkpointing can keep: use prompt tuning or LoRA, or train without adacc_hf"
        )


def _refuse_wrappers(model: nn.Module) -> None:
    wrapped = [name for name, module in model.named_modules() if is_checkpoint_wrapper(module)]
    if wrapped:
        raise NestedHooksError(
            f"{wrapped[0] or type(model).__name__} is wrapped for activation checkpointing already "
            f"({len(wrapped)} modules): switch off FSDP's activation_checkpointing, adacc_hf takes its place"
        )


# Which of a block's calls in a step is under way.


class StepCount:
    """Counts one block's calls since the step began. Its backward, once it reaches any of them, ends the step.

    A step may end without a backward, by an exception say. So the count also begins anew once the graph of every call
    is gone, after as many calls as were expected, and with `reset`.
    """

    def __init__(self) -> None:
        self._number = 0
        self._hooks: list[RemovableHandle] = []

    def next_of(self, expected: int) -> int:
        """The number, from 0, of the call that begins now, out of so many that are `expected` in a step."""
        is_gone = bool(self._hooks) and all(hook.hooks_dict_ref() is None for hook in self._hooks)
        if is_gone or self._number >= expected:
            self.reset()
        return self._number

    def returned(self, result: Any) -> None:
        """Count a call that returned `result`, and begin anew once backward reaches it."""
        self._number += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._hooks.append(leaf.register_hook(self._reached))

    def reset(self) -> None:
        """Begin anew, and leave nothing on the graph. Harmless at any time."""
        self._number = 0
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _reached(self, _: torch.Tensor) -> None:
        self.reset()
