"""Differences between releases of Transformers and torch (tested: transformers 5.5 to 5.24; torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, masking_utils
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from adacc_hf.torch_glue.distributed import is_sharded, num_ranks
from adacc_hf.torch_glue.private import CHECKPOINTED, forward_hooks, private_name
from adacc_hf.torch_glue.watchers import patched

FLAG = "gradient_checkpointing"
SETTER = private_name("PreTrainedModel", "_set_gradient_checkpointing")
_ATTENTION = private_name("PretrainedConfig", "_attn_implementation")
_CACHE_ATTRIBUTE = "_can_checkpoint_with_cache"  # of classes of layers; absent in Transformers 5.17
if hasattr(GradientCheckpointingLayer, _CACHE_ATTRIBUTE):
    private_name("GradientCheckpointingLayer", _CACHE_ATTRIBUTE)
CHECKPOINTING = "activation_checkpointing" if hasattr(PreTrainedModel, "is_activation_checkpointing") else FLAG
"""Name of gradient checkpointing in TrainingArguments and in methods of models. Transformers 5.17 has an older name."""

__all__ = ["Cache", "GradientCheckpointingLayer", "PreTrainedModel", "PretrainedConfig"]
"""Names of Transformers, which other files import from here."""


@cache
def adds_into_wider(device: torch.device, dtype: torch.dtype, is_fake: bool = False) -> bool:
    """Return True if this release of torch can add matrix products in `dtype` to a float32 sum (addmm's `out_dtype`).
    Fake tensors (`is_fake`) may be on a device that the machine lacks."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def shifts_labels(model: nn.Module) -> bool:
    """Return True if the loss of `model` compares each token with the label of the following one, as the loss of causal
    language models does. The Trainer counts labels in the same way."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # without adapters
    is_encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    loss = LOSS_MAPPING.get(getattr(inner, "loss_type", None) or "")
    return loss is ForCausalLMLoss and not is_encoder_decoder


def only_reads_cache(block: nn.Module) -> bool:
    """Return True if `block` only reads key-value caches, so a second run of the block does not change them."""
    return bool(getattr(block, _CACHE_ATTRIBUTE, False))


def observing_hooks(block: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward hooks with which Transformers collects hidden states. They run no operator."""
    hooks = [hook for module in block.modules() for hook in forward_hooks(module).values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) == "transformers.utils.output_capturing"]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class. For a class that FSDP2 derived, return the name of the original class."""
    cls = type(module)
    bases = [base.__name__ for base in cls.__bases__]
    return bases[-1] if bases[0] == "FSDPModule" else cls.__name__


def attention_of(block: nn.Module) -> list[str]:
    """Return the attention implementations ("sdpa", "eager", ...) in the configs of a block's modules."""
    configs = [getattr(module, "config", None) for module in block.modules()]
    return sorted({str(getattr(config, _ATTENTION, None)) for config in configs if config is not None})


def forward_needs_all_ranks(module: nn.Module) -> bool:
    """Return True if a forward of `module` communicates with other ranks, so that all must run equally many forwards:
    with sharded parameters, SyncBatchNorm, or attention of DeepSpeed's Ulysses (whose ranks share sequences)."""
    if is_sharded(module):
        return True
    if num_ranks() == 1:
        return False
    functions = [ALL_ATTENTION_FUNCTIONS.get(name) for name in attention_of(module)]
    shares_sequences = any(getattr(function, "__module__", "").startswith("deepspeed.") for function in functions)
    return shares_sequences or any(isinstance(inner, nn.SyncBatchNorm) for inner in module.modules())


_PYTHON_OBJECTS_OWN = torch.__version__ >= "2.13"
"""True if a Python reference to the node of an `autograd.Function` keeps the node alive. Before torch 2.13, the node
died with the last tensor or node that referred to it. For nodes of torch's operators, a reference always suffices."""


def owns_graph_node(node: Any) -> bool:
    """Return True if a Python reference to `node`, an autograd node, keeps the node alive in the graph."""
    return _PYTHON_OBJECTS_OWN or not isinstance(node, torch.autograd.function.BackwardCFunction)


def graph_owner(tensor: torch.Tensor) -> Any:
    """Return an autograd node that keeps the graph of `tensor` alive while the caller references the node: the
    `grad_fn` of the tensor, or of a new view of it (`owns_graph_node`)."""
    if owns_graph_node(tensor.grad_fn):
        return tensor.grad_fn
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


def cast_source(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf, usually a parameter, from which `tensor` was cast, or None if `tensor` is not a cast."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return True for torch's activation-checkpoint wrapper, which FSDP's activation_checkpointing installs."""
    return hasattr(module, CHECKPOINTED)


no_packed_sequences = partial(patched, [(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)])
"""Return a context without Transformers' detection of packed sequences, which reads the position ids, for fakes."""


def switch_checkpointing(
    model: nn.Module, on: bool, torch_options: dict[str, Any] | None = None, **options: Any
) -> None:
    """Switch Transformers' checkpointing of `model` on, with `torch_options` of torch's, or off."""
    if on:
        getattr(model, f"{CHECKPOINTING}_enable")(torch_options, **options)
    else:
        getattr(model, f"{CHECKPOINTING}_disable")()


def layerdrop_rates(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Return (module or config, attribute, rate) of each layerdrop rate of `model` that is not 0."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    owners = [*model.modules(), *{id(c): c for c in configs if isinstance(c, PretrainedConfig)}.values()]
    rates = [(owner, name, rate) for owner in owners for name, rate in vars(owner).items() if "layerdrop" in name]
    return [(owner, name, rate) for owner, name, rate in rates if isinstance(rate, float) and rate > 0.0]


@contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[None]:
    """Set all layerdrop rates of a Transformers `model` to 0 inside the `with` block."""
    rates = layerdrop_rates(model)
    for owner, name, _ in rates:
        setattr(owner, name, 0.0)
    try:
        yield
    finally:
        for owner, name, rate in rates:
            setattr(owner, name, rate)
