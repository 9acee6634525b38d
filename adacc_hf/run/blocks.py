"""Installation of removable functions that run the calls of a model's blocks.

A function in place of `forward` of each block runs the block's calls in train mode. Hooks of the block run around the
function, once per call. Meanwhile Transformers' own checkpointing of the blocks is off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from threading import RLock
from typing import Any, Protocol
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
from adacc_hf.run.block_search import checkpointed_layers, find_blocks, refuse_adapters, refuse_wrappers
from adacc_hf.torch_glue.compat import FLAG, SETTER, Cache, PreTrainedModel, layerdrop_rates, only_reads_cache
from adacc_hf.torch_glue.private import (
    current_autograd_node,
    eval_frame_callback,
    is_transformed,
    outer_hooks,
    unwritten_originals,
)
from adacc_hf.torch_glue.second_run import checkpoint_call
from adacc_hf.torch_glue.zero3 import gather_together, gathers_inside

log = logging.getLogger(__name__)

_ABSENT = object()
_blocks_of: WeakKeyDictionary[Cache, WeakSet[nn.Module]] = WeakKeyDictionary()
"""Blocks that were called with a cache in training, and left it empty."""


class Strategy(Protocol):
    """Strategy for running the calls of a block while gradients are enabled: plainly, checkpointed, or under a plan."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of `block` and return the result of `fn(*args)`. `kwargs` is already bound in `fn`."""


class PlainStrategy:
    """Strategy that runs a block's forward unchanged."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args)


class CheckpointStrategy:
    """Strategy that runs a block under torch's own checkpoint, for example in the steps before the first policy."""

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint_call(block, fn, *args)


class BlockCall:
    """One call of a block in a step: its name, and the strategy that runs it."""

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name = name
        self.strategy = strategy
        self.observer: Strategy | None = None
        """Strategy that runs `strategy`, whichever it is by then, and measures the call. None outside measurements."""


class BlockFunction:
    """Replacement of a block's `forward`, which runs the block's calls in train mode under a strategy. A copy of the
    model runs plainly."""

    def __init__(self, name: str, block: nn.Module, strategy: Strategy, owner: Installation) -> None:
        self.name = name
        self.block = block
        self.is_installed = True
        """False in a copy of the model, and after the removal."""
        own_forward = block.__dict__.get("forward")
        while isinstance(own_forward, BlockFunction):  # of an earlier policy
            own_forward = own_forward.own_forward
        self.own_forward: Callable[..., Any] | None = own_forward
        """The `forward` that other code has set on the block itself, or None."""
        self._owner = owner
        self.calls = [BlockCall(name, strategy)]
        """The block's calls in a step, in order."""
        self.num_calls = 0
        """Number of calls of the block so far with gradients enabled."""
        self._has_warned_of_transform = False
        self.next_call = 0
        """Index of the next call in the step, among `calls`."""

    def __getstate__(self) -> dict[str, Any]:
        return {"block": self.block, "own_forward": self.own_forward, "is_installed": False}

    @property
    def forward(self) -> Callable[..., Any]:
        """The block's present `forward`: its class, or the class's method, may be replaced during a run."""
        return type(self.block).forward.__get__(self.block) if self.own_forward is None else self.own_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_training = self.is_installed and self.block.training and torch.is_grad_enabled()
        if not is_training or self._has_no_storage(args):
            return self.forward(*args, **kwargs)
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
        caches = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Cache)]
        if caches and not only_reads_cache(self.block):
            for cache in caches:
                self._refuse_keys(cache)
            # A second run in backward would append to them.
            args = tuple(None if isinstance(argument, Cache) else argument for argument in args)
            kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        if not self._owner.lock.acquire(blocking=False):
            raise ConcurrentCallError(
                f"block {self.name} is called in one thread while another thread is inside a block of the same model, "
                f"so the calls of a step cannot be distinguished: train one model in one thread (a copy of it in "
                f"another), or without adacc_hf"
            )
        try:
            with unwritten_originals():
                call, fn = self.calls[self.next_call], partial(self.forward, **kwargs)
                self._owner.note_call(call.name)
                result = (call.observer or call.strategy).run(self.block, fn, args, kwargs)
                self.next_call = (self.next_call + 1) % len(self.calls)
                return result
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise NestedHooksError(
                f"block {self.name} calls torch.func.grad, vjp or jacrev, which torch refuses inside the saved-tensor "
                f"hooks of a policy or a checkpoint: {BLOCK_CLASSES_HINT}"
            ) from error
        finally:
            self._owner.lock.release()

    def _refuse_keys(self, cache: Cache) -> None:
        """Raise ValueError if a key-value cache contains keys, or would contain the block's keys in plain training."""
        blocks = _blocks_of.setdefault(cache, WeakSet())
        if self.block in blocks or cache.get_seq_length() > 0:
            raise ValueError(
                f"block {self.name} gets past_key_values that contain keys (prefix tuning, or a text trained in "
                f"segments): replay cannot preserve a cache, and training without it would give other results; train "
                f"without adacc_hf, or without the cache (prompt tuning and LoRA need none)"
            )
        blocks.add(self.block)

    def _has_no_storage(self, args: tuple[Any, ...]) -> bool:
        """Return True if the tensors in `args` have no storage (on device "meta"), or may stand for several
        (`is_transformed`)."""
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return True
        has_transform = is_transformed()
        if has_transform and not self._has_warned_of_transform:
            self._has_warned_of_transform = True
            log.warning(
                "Adacc: block %s runs inside a torch.func transform (grad, vmap, jvp) or forward-mode AD, where calls "
                "cannot be recorded: its calls there run plainly and save no memory",
                self.name,
            )
        return has_transform

    def set_calls(self, number: int) -> None:
        """Set how many calls of the block a step has, and begin a step. Added calls get the first call's strategy."""
        self.next_call = 0
        names = [call_name(self.name, place) for place in range(len(self.calls) + 1, number + 1)]
        self.calls = [*self.calls, *(BlockCall(name, self.calls[0].strategy) for name in names)][:number]


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
        self.lock = RLock()
        """Lock of the model, which a thread holds while it is inside a block."""
        self.blocks = {name: BlockFunction(name, block, PlainStrategy(), self) for name, block in blocks}
        self.calls = {name: function.calls[0] for name, function in self.blocks.items()}
        """Each call of a block in a step, by name."""
        self.on_other_order: Callable[[], None] | None = None
        """Function to call before a call of a block that comes earlier in `calls` than the call before it."""
        self._places = {name: place for place, name in enumerate(self.calls)}
        self._latest_place = -1
        self._num_calls_before = dict.fromkeys(self.blocks, 0)
        self._undo: list[tuple[nn.Module, str, Any]] = []
        self._restore_hooks = [gather_together(block, self._set) for _, block in blocks]
        for name, block in blocks:
            for layer in checkpointed_layers(block):
                self._set(layer, FLAG, False)
            self._set(block, "forward", self.blocks[name])
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._set(module, SETTER, Reinstaller(self, getattr(module, SETTER)))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The blocks by name. The dict is empty after `remove`."""
        return {name: function.block for name, function in self.blocks.items() if function.is_installed}

    def remove(self) -> None:
        """Remove the functions, and restore all attributes of the model. Further calls have no effect."""
        while self._undo:
            module, name, original = self._undo.pop()
            if name == "forward" and not isinstance(module.__dict__.get(name), BlockFunction):
                continue  # other code has replaced or removed it since
            if original is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = original
        for restore in self._restore_hooks:
            restore()
        for function in self.blocks.values():
            function.is_installed = False

    def expect(self, calls: Iterable[str]) -> None:
        """Set the names of the block calls in a step, in call order and of every block, and begin a step."""
        calls = list(calls)
        if calls != list(self.calls):
            for block, number in calls_per_block(calls).items():
                self.blocks[block].set_calls(number)
            call_by_name = {call.name: call for block in self.blocks.values() for call in block.calls}
            self.calls = {name: call_by_name[name] for name in calls}
            self._places = {name: place for place, name in enumerate(calls)}
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: the next call of each block counts as its first call in the step."""
        self._latest_place = -1
        for name, function in self.blocks.items():
            self._num_calls_before[name] = function.num_calls
            function.next_call = 0

    def note_call(self, name: str) -> None:
        """Note that the call `name` of a block begins."""
        before, self._latest_place = self._latest_place, self._places[name]
        if self._latest_place <= before and self.on_other_order is not None and current_autograd_node() is None:
            self.on_other_order()

    def reinstall(self, model: nn.Module) -> None:
        """Switch off the checkpointing of the blocks that other code has switched on in `model`. `remove` then restores
        what the other code has set."""
        modules = set(model.modules())
        for place, (module, name, _) in enumerate(self._undo):
            if name == FLAG and module in modules:
                self._undo[place] = module, name, module.__dict__.get(name, _ABSENT)
                module.__dict__[name] = False

    def uncalled(self) -> list[str]:
        """Return the names of the blocks that were never called with gradients enabled, [] with layerdrop."""
        return self._without_calls_since(dict.fromkeys(self.blocks, 0))

    def skipped_blocks(self) -> list[str]:
        """Return the names of the blocks not called with gradients in the last step, [] with layerdrop."""
        return self._without_calls_since(self._num_calls_before)

    def _without_calls_since(self, before: dict[str, int]) -> list[str]:
        if layerdrop_rates(self.model):
            return []
        return [name for name, function in self.blocks.items() if function.num_calls == before[name]]

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        self._undo.append((module, name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value


class Reinstaller:
    """Replacement of a model's `_set_gradient_checkpointing`, after which the blocks are still not checkpointed: TRL
    switches checkpointing off before reference forwards and on afterwards."""

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
