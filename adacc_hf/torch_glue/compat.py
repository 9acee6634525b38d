"""Where releases of Transformers and torch differ, in one place (tested: transformers 5.17 and 5.23, torch 2.11,
2.13 and 2.15)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, masking_utils
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.logging import warning_once

from adacc_hf.torch_glue.model_state import ModelState
from adacc_hf.torch_glue.no_trace import state_before
from adacc_hf.torch_glue.private import (
    CHECKPOINTED,
    eval_frame_callback,
    forward_hooks,
    named,
    outer_hooks,
    sequence_number,
    tree_leaves,
)
from adacc_hf.torch_glue.rng_state import PythonStates

FLAG = "gradient_checkpointing"
FUNCTION = named("GradientCheckpointingLayer", "_gradient_checkpointing_func")
SETTER = named("PreTrainedModel", "_set_gradient_checkpointing")
_ATTENTION = named("PretrainedConfig", "_attn_implementation")
_READS_CACHE = "_can_checkpoint_with_cache"
"""The attribute by which a layer says so; 5.17 has no such layers."""
if hasattr(GradientCheckpointingLayer, _READS_CACHE):
    named("GradientCheckpointingLayer", _READS_CACHE)
CHECKPOINTING = "activation_checkpointing" if hasattr(PreTrainedModel, "is_activation_checkpointing") else FLAG
"""What TrainingArguments call torch's checkpointing, and models the methods that switch it; 5.17 has the older name."""

__all__ = [
    "CHECKPOINTING", "FLAG", "FUNCTION", "SETTER", "GradientCheckpointingLayer", "PreTrainedModel", "PretrainedConfig",
    "adds_into_wider", "attention_of", "block_of", "cast_from", "checkpointed", "class_name", "has_cache",
    "has_filled_cache", "is_compiled_around", "keeps_cache", "keyword_arguments", "layerdrop_rates",
    "no_packed_sequences", "observing_hooks", "outer_hooks", "owner_of", "owns_its_node", "run_inside_hooks",
    "switch_checkpointing", "without_caches", "without_layerdrop",
]  # fmt: skip


@cache
def adds_into_wider(device: torch.device, dtype: torch.dtype, is_fake: bool = False) -> bool:
    """Whether products of that type are added to a float32 sum while they are made (`torch.addmm(out_dtype=...)`).

    A small one tells: CUDA can, with some releases of torch, of halves; CPUs and ROCm cannot. `is_fake` is for tensors
    without memory, whose device need not be here.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def keyword_arguments(fn: Any) -> dict[str, Any]:
    """The keyword arguments of a block's call; every release passes them bound in a functools.partial."""
    return fn.keywords if isinstance(fn, partial) else {}


def block_of(fn: Any) -> nn.Module | None:
    """The block whose forward Transformers hands to a checkpoint function, as a partial; None for other functions.

    Of the bound `__call__` in 5.17, of the class's `forward` with the block in front in 5.23.
    """
    if isinstance(fn, partial) and fn.args and isinstance(fn.args[0], nn.Module):
        return fn.args[0]
    owner = getattr(fn.func if isinstance(fn, partial) else fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def run_inside_hooks(
    fn: Callable[..., Any], args: tuple[Any, ...], run: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
) -> Any:
    """`run(forward, args)` for the forward of the block that `fn` calls, inside the block's own forward hooks.

    Transformers 5.23 hands over the forward alone, 5.17 the whole call. Hooks must not be recorded and replayed: those
    of FSDP2 gather the parameters before forward and drop them after it.
    """
    block, call = block_of(fn), fn.func if isinstance(fn, partial) else fn
    if block is None or getattr(call, "__func__", None) is not nn.Module.__call__:
        return run(fn, args)
    forward, own = block.forward, block.__dict__.get("forward")

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return run(partial(forward, **kwargs), args)

    block.forward = stand_in
    try:
        return fn(*args)
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own


def without_caches(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The call with every key-value cache replaced by None: replay would append to it again."""
    if any(isinstance(argument, Cache) for argument in args):
        args = tuple(None if isinstance(argument, Cache) else argument for argument in args)
    keywords = keyword_arguments(fn)
    if any(isinstance(argument, Cache) for argument in keywords.values()):
        kept = {name: None if isinstance(argument, Cache) else argument for name, argument in keywords.items()}
        fn = partial(fn.func, *fn.args, **kept)
    return fn, args


def has_cache(fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether there is a key-value cache among the arguments."""
    return any(isinstance(value, Cache) for value in (*args, *keyword_arguments(fn).values()))


def keeps_cache(block: nn.Module) -> bool:
    """Return True if `block` only reads key-value caches, so that a second run of it changes none."""
    return bool(getattr(block, _READS_CACHE, False))


def has_filled_cache(block: nn.Module, fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether a key-value cache among the arguments holds something for `block` before its call."""
    caches = [value for value in (*args, *keyword_arguments(fn).values()) if isinstance(value, Cache)]
    if not caches:
        return False
    places = {index for module in block.modules() if isinstance(index := getattr(module, "layer_idx", None), int)}
    layers = [getattr(getattr(cache, "self_attention_cache", cache), "layers", []) for cache in caches]
    keys = [getattr(each[place], "keys", None) for each in layers for place in places if place < len(each)]
    return any(tensor is not None and tensor.numel() > 0 for tensor in keys)


def observing_hooks(block: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks by which Transformers collects hidden states and attentions: they run no operator."""
    hooks = [hook for module in block.modules() for hook in forward_hooks(module).values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) == "transformers.utils.output_capturing"]


def class_name(module: nn.Module) -> str:
    """The name of a module's class; FSDP2 puts one of its own, which has another name, in front of it."""
    cls = type(module)
    bases = [base.__name__ for base in cls.__bases__]
    return bases[-1] if bases[0] == "FSDPModule" else cls.__name__


def attention_of(block: nn.Module) -> list[str]:
    """The attention implementations ("sdpa", "eager", ...) that the modules of a block are set to."""
    configs = [getattr(module, "config", None) for module in block.modules()]
    return sorted({str(getattr(config, _ATTENTION, None)) for config in configs if config is not None})


def is_compiled_around() -> bool:
    """Whether the caller runs inside a function or module that torch.compile compiles.

    `is_compiling` says so to the compiler, which goes no further then, and the second half when Python runs.
    """
    return torch.compiler.is_compiling() or eval_frame_callback() not in (None, False)


class _Same(torch.autograd.Function):
    """Gives back what it gets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def _python_objects_own() -> bool:
    """Whether the Python object of a function written in Python keeps its node, as those of torch's functions do.

    Before torch 2.13 the node keeps the object, and goes with the last tensor or node that leads to it.
    """
    with torch.enable_grad():
        node = _Same.apply(torch.ones(1, device="cpu", requires_grad=True)).grad_fn
    try:
        sequence_number(node)
    except RuntimeError:
        return False
    return True


_OWNED = _python_objects_own()


def owns_its_node(node: Any) -> bool:
    """Whether the Python object `node` keeps alive what it stands for in autograd's graph."""
    return _OWNED or not isinstance(node, torch.autograd.function.BackwardCFunction)


def owner_of(tensor: torch.Tensor) -> Any:
    """A node that keeps the graph of `tensor` alive: its own, or that of a view if its own does not."""
    if owns_its_node(tensor.grad_fn):
        return tensor.grad_fn
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


def cast_from(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf that `tensor` is a copy of in another type; None if it is no such copy."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether `module` is torch's activation-checkpoint wrapper, which FSDP's activation_checkpointing installs."""
    return hasattr(module, CHECKPOINTED)


@contextmanager
def no_packed_sequences() -> Iterator[None]:
    """While open, Transformers takes no batch for packed sequences.

    It reads that off the values of the position ids, and tensors without memory have none.
    """
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


CallAgain = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""A function that returns the function to call and its arguments."""


def checkpointed(
    fn: Callable[..., Any], *args: Any, block: nn.Module | None = None, hold: Callable[[], CallAgain] | None = None
) -> Any:
    """Run `fn(*args)`, a call of `block`, under torch's checkpoint, whose hooks are off again even if `fn` raises.

    Before torch 2.13 the hooks stay on for as long as somebody holds the error. In backward, all state that the call
    changed is what it was before the call, and afterwards what it was after it: buffers and counters change once per
    call, lists get each item once, and generators give the same numbers. torch sees to its own default ones alone.

    If given, `hold` is called after the forward. Its result is held until backward in place of `fn` and `args`, and
    returns the function and arguments of the second forward.
    """
    raised: list[BaseException] = []
    in_forward = True
    before = PythonStates()
    moved: list[ModelState | PythonStates] = []
    # torch holds `run` until backward. The call stands in a list, so that what `hold` returns can take its place.
    held: list[CallAgain] = [lambda: (fn, args)]

    def run(*_: torch.Tensor) -> Any:
        if not in_forward:
            with ExitStack() as stack:
                for states in moved:
                    stack.enter_context(states.back_for_a_while())
                again, given = held[0]()
                stack.callback(torch.clear_autocast_cache)  # it outlives this call if backward is under autocast
                return again(*given)
        try:
            called, given = held[0]()
            return called(*given)
        except BaseException as error:
            raised.append(error)
            return None

    with state_before(block, fn, args) as changed:
        result = checkpoint(run, *_on_devices(fn, args), use_reentrant=False)
    in_forward = False
    if before.have_moved():  # else they are let go: 23 KiB for every block
        moved.append(before)
    moved += changed
    if raised:
        raise raised.pop()
    if hold is not None:
        held[0] = hold()
    return result


def _on_devices(fn: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """An empty tensor on each device that a call has tensors on, but the CPU: torch's checkpoint finds out by its
    arguments whose generators' states to keep."""
    leaves = tree_leaves((args, keyword_arguments(fn)))
    devices = dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    return [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]


def switch_checkpointing(
    model: nn.Module, on: bool, torch_options: dict[str, Any] | None = None, **options: Any
) -> None:
    """Switch Transformers' checkpointing of `model` on, with its options and those of torch's checkpoint, or off."""
    if on:
        getattr(model, f"{CHECKPOINTING}_enable")(torch_options, **options)
    else:
        getattr(model, f"{CHECKPOINTING}_disable")()


def layerdrop_rates(model: nn.Module) -> list[tuple[Any, str, float]]:
    """(owner, name, rate) of each chance of leaving a layer out; models read them off their modules or configs."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    owners = [*model.modules(), *{id(c): c for c in configs if isinstance(c, PretrainedConfig)}.values()]
    rates = [(owner, name, rate) for owner in owners for name, rate in vars(owner).items() if "layerdrop" in name]
    return [(owner, name, rate) for owner, name, rate in rates if isinstance(rate, float) and rate > 0.0]


@contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[None]:
    """While open, no layer is left out by chance."""
    rates = layerdrop_rates(model)
    for owner, name, _ in rates:
        setattr(owner, name, 0.0)
    try:
        yield
    finally:
        for owner, name, rate in rates:
            setattr(owner, name, rate)


# Transformers' warning that caching is incompatible with gradient checkpointing, where nobody asked for the latter.
#
# A block's own flag is how a function gets around it (`blocks.py`), so Transformers takes it to be checkpointed, and
# says in its log that it leaves the key-value cache out. It does so under any budget, and there is nothing to change
# about it.

_LOG = logging.getLogger(GradientCheckpointingLayer.__module__)
_TEXT = "Caching is incompatible with gradient checkpointing"


class CachingWarning(logging.Filter):
    """Keeps that warning from the log while it is on, if it is about a layer that `is_ours`; all else passes."""

    _has_kept = False
    """Whether any of them has since the last was removed: of several that are on, only the first is asked."""

    def __init__(self, is_ours: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_ours = is_ours
        _LOG.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` goes on; asked where it is logged, so that the layer is on the stack."""
        if not record.getMessage().startswith(_TEXT):
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            layer = frame.f_locals.get("self")
            if isinstance(layer, GradientCheckpointingLayer):
                is_ours = self._is_ours(layer)
                CachingWarning._has_kept |= is_ours
                return not is_ours
            frame = frame.f_back
        return True

    def remove(self) -> None:
        """Let everything pass again. Harmless when called again."""
        _LOG.removeFilter(self)
        if CachingWarning._has_kept:
            # It counts as said once, and whoever checkpoints layers of that class from now on has not seen it.
            warning_once.cache_clear()
        CachingWarning._has_kept = False
