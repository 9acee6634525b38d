"""Where releases of Transformers and torch differ, in one place (tested: transformers 5.17 and 5.23, torch 2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, masking_utils
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"
SETTER = "_set_gradient_checkpointing"

__all__ = [
    "FLAG", "FUNCTION", "SETTER", "GradientCheckpointingLayer", "PreTrainedModel", "attention_of", "block_of",
    "class_name", "is_compiled_around", "keyword_arguments", "layerdrop_rates", "no_packed_sequences", "outer_hooks",
    "without_caches", "without_layerdrop",
]  # fmt: skip


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


def without_caches(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The call with every key-value cache replaced by None: replay would append to it again."""
    if any(isinstance(argument, Cache) for argument in args):
        args = tuple(None if isinstance(argument, Cache) else argument for argument in args)
    keywords = keyword_arguments(fn)
    if any(isinstance(argument, Cache) for argument in keywords.values()):
        kept = {name: None if isinstance(argument, Cache) else argument for name, argument in keywords.items()}
        fn = partial(fn.func, *fn.args, **kept)
    return fn, args


def class_name(module: nn.Module) -> str:
    """The name of a module's class; FSDP2 puts one of its own, which has another name, in front of it."""
    cls = type(module)
    bases = [base.__name__ for base in cls.__bases__]
    return bases[-1] if bases[0] == "FSDPModule" else cls.__name__


def attention_of(block: nn.Module) -> list[str]:
    """The attention implementations ("sdpa", "eager", ...) that the modules of a block are set to."""
    configs = [getattr(module, "config", None) for module in block.modules()]
    return sorted({str(getattr(config, "_attn_implementation", None)) for config in configs if config is not None})


def outer_hooks() -> Any:
    """The innermost pair of saved-tensor hooks that is active now, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_compiled_around() -> bool:
    """Whether the caller runs inside a function or module that torch.compile compiles.

    `is_compiling` says so to the compiler, which goes no further then, and the second half when Python runs.
    """
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    return torch.compiler.is_compiling() or callback() not in (None, False)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether `module` is torch's activation-checkpoint wrapper, which FSDP's activation_checkpointing installs."""
    return hasattr(module, "_checkpoint_wrapped_module")


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
