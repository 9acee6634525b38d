"""Differences between releases of Transformers and torch (tested: transformers 5.5 to 5.24; torch 2.11 to 2.15).

`checkpoint_call` runs a block under torch's checkpoint, and restores state that torch does not restore.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import PretrainedConfig, masking_utils
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from adacc_hf.artifacts.errors import BLOCK_CLASSES_HINT, UnrestorableError
from adacc_hf.torch_glue.block_state import BlockState, changes_in_place, report_change
from adacc_hf.torch_glue.distributed import is_sharded, num_ranks
from adacc_hf.torch_glue.private import CHECKPOINTED, forward_hooks, private_name, tree_leaves
from adacc_hf.torch_glue.rng_state import RandomStates
from adacc_hf.torch_glue.second_run import SecondRun, comparison, is_measuring, may_end_early
from adacc_hf.torch_glue.watchers import patched

FLAG = "gradient_checkpointing"
FUNCTION = private_name("GradientCheckpointingLayer", "_gradient_checkpointing_func")
SETTER = private_name("PreTrainedModel", "_set_gradient_checkpointing")
_ATTENTION = private_name("PretrainedConfig", "_attn_implementation")
_CACHE_ATTRIBUTE = "_can_checkpoint_with_cache"  # of classes of layers; absent in Transformers 5.17
if hasattr(GradientCheckpointingLayer, _CACHE_ATTRIBUTE):
    private_name("GradientCheckpointingLayer", _CACHE_ATTRIBUTE)
CHECKPOINTING = "activation_checkpointing" if hasattr(PreTrainedModel, "is_activation_checkpointing") else FLAG
"""Name of gradient checkpointing in TrainingArguments and in methods of models. Transformers 5.17 has an older name."""

__all__ = ["Cache", "GradientCheckpointingLayer", "PreTrainedModel", "PretrainedConfig"]
"""Names of Transformers, which other files import from here."""


_LAYERS_LOG = logging.getLogger(GradientCheckpointingLayer.__module__)


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


def keyword_arguments(fn: Any) -> dict[str, Any]:
    """Return the keyword arguments that Transformers has bound in `fn`, which it passes to a checkpoint function."""
    return fn.keywords if isinstance(fn, partial) else {}


def block_of(fn: Any) -> nn.Module | None:
    """Return the block that `fn` calls, or None. Transformers passes `fn` to a checkpoint function: in 5.17 a partial
    of the bound `__call__`, and in 5.23 a partial of the class's `forward` with the block as its first argument."""
    if isinstance(fn, partial) and fn.args and isinstance(fn.args[0], nn.Module):
        return fn.args[0]
    owner = getattr(fn.func if isinstance(fn, partial) else fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def without_caches(fn: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return (fn, args) of a block's call without key-value caches, to which a second run in backward would append."""
    args = tuple(None if isinstance(argument, Cache) else argument for argument in args)
    keywords = keyword_arguments(fn)
    if any(isinstance(argument, Cache) for argument in keywords.values()):
        keywords = {name: None if isinstance(argument, Cache) else argument for name, argument in keywords.items()}
        fn = partial(fn.func, *fn.args, **keywords)
    return fn, args


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


SecondCall = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Type of a function that returns (function, arguments) for the second run of a checkpointed forward."""


def checkpoint_call(
    fn: Callable[..., Any],
    *args: Any,
    block: nn.Module | None = None,
    hold: Callable[[], SecondCall] | None = None,
    has_same_inputs: bool = True,
    is_held: bool = False,
    repeats_code: bool = True,
) -> Any:
    """Run `fn(*args)`, a call of `block`, under torch's checkpoint. In backward, the call runs a second time, and must
    save the tensors of the first run (`comparison`).

    For the second run, buffers and attributes that the first run changed (`BlockState`) and Python's and numpy's
    generators get their earlier values. If the first call changes other state, such as a list, this call and all later
    ones run once. If a later call is the first that does so, raise UnrestorableError, unless `is_held`: then the caller
    keeps the call's tensors until it has asked `changes_in_place`.

    If `hold` is given, `hold()` is called after the first run, and the returned `SecondCall` stays alive in place of
    `fn` and `args`. Set `has_same_inputs` to False if it decodes lossy payloads, and `repeats_code` to False if it runs
    a traced graph. torch's hooks are removed even if `fn` raises: before torch 2.13 they would stay active.
    """
    if repeats_code and changes_in_place(block):
        return fn(*args)
    errors: list[BaseException] = []
    has_begun = False
    python_states, state = RandomStates(), BlockState(block, (args, keyword_arguments(fn)))
    states_to_restore: list[BlockState | RandomStates] = []
    # torch keeps `run` until backward. The call is in a list, so that the result of `hold` can replace it.
    calls: list[SecondCall] = [lambda: (fn, args)]

    def run_once() -> Any:
        function, arguments = calls[0]()
        return function(*arguments) if compared is None else compared.run(partial(function, *arguments))

    def run(*_: torch.Tensor) -> Any:
        nonlocal has_begun
        if has_begun:  # in backward, or in `torch.autograd.grad` inside the block
            with ExitStack() as stack:
                for states in states_to_restore:
                    stack.enter_context(states.temporarily_restored())
                # If backward runs under autocast, autocast's cache would otherwise outlive this call.
                stack.callback(torch.clear_autocast_cache)
                return run_once()
        has_begun = True
        try:
            return run_once()
        except BaseException as error:
            errors.append(error)
            return None

    compared = comparison(block, has_same_inputs, repeats_code)
    # torch's checkpoint saves the generator states of its arguments' devices.
    leaves = tree_leaves((args, keyword_arguments(fn)))
    devices = dict.fromkeys(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
    arguments = [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]
    with set_checkpoint_early_stop(may_end_early(block)):
        result = checkpoint(run, *arguments, use_reentrant=False)
    if errors:
        raise errors.pop()
    if python_states.have_advanced():  # else they are freed: 23 KiB per block
        states_to_restore.append(python_states)
    lost = state.find_changes(repeats_code)
    if state.changed or state.written:
        states_to_restore.append(state)
    if isinstance(compared, SecondRun):
        compared.end_first_run(keeps_tensors=lost is not None)
    elif lost is not None and not (is_held or is_measuring()):
        raise UnrestorableError(
            f"forward of block class {type(block).__name__} changes {lost} in place, but did not in its first call, "
            f"and there is no copy to restore it from, while torch's checkpoint runs the block again in backward: "
            f"assign a new value to the attribute, change it from the first step on, or, {BLOCK_CLASSES_HINT}"
        )
    if lost is not None and block is not None:
        report_change(block, lost)
    if hold is not None:
        calls[0] = hold()
    return result


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


def drop_caching_warning() -> Callable[[], None]:
    """Drop Transformers' warning on caches under checkpointing until the returned function is called."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Caching is incompatible with gradient checkpointing")

    _LAYERS_LOG.addFilter(is_other)
    return partial(_LAYERS_LOG.removeFilter, is_other)
