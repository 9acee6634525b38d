"""Search for a model's transformer blocks, and errors for models whose blocks cannot run under a policy."""

from __future__ import annotations

from collections import Counter

from torch import nn

from adacc_hf.artifacts.errors import NestedHooksError, NoBlocksError
from adacc_hf.torch_glue.compat import GradientCheckpointingLayer, class_name, is_checkpoint_wrapper


def find_blocks(model: nn.Module, block_classes: tuple[str, ...] | None = None) -> list[tuple[str, nn.Module]]:
    """Return (module path, module) of every outermost block, in module order.

    Raise NoBlocksError if the model has no block.
    """
    class_names = set(block_classes or ())
    blocks: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_block = class_name(module) in class_names if class_names else isinstance(module, GradientCheckpointingLayer)
        if is_block and not any(name.startswith(f"{outer}.") for outer, _ in blocks):
            blocks.append((name, module))
    if not blocks:
        owner = type(model).__name__
        problem = (
            f"block_classes={block_classes!r} names no module of {owner}"
            if class_names
            else f"{owner} has no repeated blocks: none of its modules is a GradientCheckpointingLayer of Transformers"
        )
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        repeated = Counter(class_name(layer) for layers in lists for layer in layers)
        listed = ", ".join(f"{name} ({number} times)" for name, number in repeated.items())
        hint = f" (repeated in its ModuleLists: {listed})" if listed else ""
        raise NoBlocksError(
            f"{problem}; name the class of its layers{hint} with AdaccConfig(block_classes="
            f"{tuple(repeated) or ('MyLayer',)!r})"
        )
    return blocks


def checkpointed_layers(block: nn.Module) -> list[nn.Module]:
    """Return the layers that Transformers could checkpoint: `block`, and layers inside it, as in Swin's stages."""
    return [module for module in block.modules() if isinstance(module, GradientCheckpointingLayer)]


def refuse_adapters(model: nn.Module) -> None:
    """Raise ValueError for adapters whose blocks cannot run again in backward: prefix tuning stores the prefix in
    key-value caches, and PEFT sets the offsets of an aLoRA with hooks that exist during the model's forward only."""
    adapters = [getattr(module, "peft_config", None) for module in model.modules()]
    configs = [config for each in adapters if isinstance(each, dict) for config in each.values()]
    kinds = [str(getattr(config, "peft_type", None)).rpartition(".")[2] for config in configs]
    if refused := [kind for kind in kinds if kind in ("PREFIX_TUNING", "CARTRIDGE")]:
        raise ValueError(
            f"{refused[0].lower().replace('_', ' ')} passes its prefix to the blocks as a key-value cache, which "
            f"neither replay nor gradient checkpointing can preserve: use prompt tuning or LoRA, or train without "
            f"adacc_hf"
        )
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        raise ValueError(
            "alora_invocation_tokens is set in the LoraConfig: PEFT's hooks for an aLoRA are gone when backward runs a "
            "block again, outside of PEFT's own gradient checkpointing. Train with gradient_checkpointing=True without "
            "adacc_hf, or use LoRA"
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Raise NestedHooksError if a module of `model` is wrapped for activation checkpointing."""
    wrapped = [name for name, module in model.named_modules() if is_checkpoint_wrapper(module)]
    if wrapped:
        raise NestedHooksError(
            f"{wrapped[0] or type(model).__name__} is wrapped for activation checkpointing already "
            f"({len(wrapped)} modules): switch off FSDP's activation_checkpointing, which adacc_hf replaces"
        )
