"""What else saves activation memory for the same Transformers model, installed as its own users would.

Each says what it lacks on a device, so that a table can show the reason in its row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adacc_hf.compat import FLAG, FUNCTION, SETTER, GradientCheckpointingLayer
from adacc_hf.eval.methods import (
    ADACC,
    CHECKPOINTING,
    PLAIN,
    Bench,
    Budget,
    Installed,
    Method,
    Promise,
    install_checkpointing,
)
from adacc_hf.eval.methods import adacc as adacc_method

COMPILE_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.05)
"""Settings of `activation_memory_budget`: the share of what the compiler's default saves. At 0 it saves inputs only."""

XFORMERS_BUDGETS = (0.25, 0.5, 0.75)

aten = torch.ops.aten
SAVED_OPERATORS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Matrix products and fused attention: what selective checkpointing usually saves."""


def install_offload(bench: Bench, budget: Budget | None) -> Installed:
    """Checkpointing whose saved block inputs live in host memory."""
    return install_checkpointing(bench, budget, offload=True)


def install_selective(bench: Bench, budget: Budget | None) -> Installed:
    """torch's eager selective checkpointing around each block, saving SAVED_OPERATORS."""
    contexts = partial(create_selective_checkpoint_contexts, _save_products)
    getattr(bench.model, SETTER)(True, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return Installed(call=bench.model, promise=Promise.EXACT)


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def install_trl_offloading(bench: Bench, budget: Budget | None) -> Installed:
    """trl's activation offloading, entered around forward as its trainers do."""
    from trl.models.activation_offloading import OffloadActivations

    def call(**batch: torch.Tensor) -> Any:
        with OffloadActivations():
            return bench.model(**batch)

    return Installed(call=call, promise=Promise.EXACT)


def install_xformers(bench: Bench, budget: Budget | None, share: float) -> Installed:
    """xformers' selective checkpointing: each block gets the policy that its solver finds for `share` of its memory.

    xformers solves for positional arguments alone, and a block of Transformers takes keywords: its checkpoint function
    stands where Transformers' own would, which gets them bound.
    """
    from xformers.checkpoint import checkpoint as selective
    from xformers.checkpoint import get_optimal_checkpoint_policy

    def checkpoint_function() -> Callable[..., Any]:
        policies: list[Callable[..., bool]] = []

        def function(block: Callable[..., Any], *args: Any) -> Any:
            if not policies:
                policies.append(get_optimal_checkpoint_policy(block, *args, memory_budget=share))
            return selective(block, *args, policy_fn=policies[0])

        return function

    blocks = [module for module in bench.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for block in blocks:
        setattr(block, FUNCTION, checkpoint_function())
        setattr(block, FLAG, True)
    return Installed(call=bench.model, promise=Promise.EXACT)


def install_compiled(bench: Bench, budget: Budget | None, share: float) -> Installed:
    """torch.compile with a budget for activations."""
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = share
    return Installed(call=torch.compile(bench.model), promise=Promise.OWN_RANDOMNESS)


def install_adacc_compiled(bench: Bench, budget: Budget | None) -> Installed:
    """torch.compile with our partitioner, which may compress too."""
    from adacc_hf.partitioner.backend import adacc

    compiled = torch.compile(bench.model, backend=adacc, options={"memory_budget": budget})
    return Installed(call=compiled, promise=Promise.OWN_LOSSY)


def need_host_memory_elsewhere(device: str) -> str | None:
    return "activations are in host memory already: run it with --device cuda" if device == "cpu" else None


def need_trl(device: str) -> str | None:
    if device == "cpu":
        return "trl moves activations from an accelerator to the host: run it with --device cuda"
    return missing_package("trl")


def need_xformers(device: str) -> str | None:
    if device == "cpu":
        return "xformers times operators with CUDA's clock: run it with --device cuda"
    return missing_package("xformers") or missing_package("scipy")


def missing_package(name: str) -> str | None:
    """What to do about a package that is not installed; None if it is."""
    return None if importlib.util.find_spec(name) else f"{name} is not installed: pip install 'adacc-hf[peers]'"


ADACC_VARIANTS: dict[str, Method] = {
    "adacc_lossless": adacc_method("Adacc, lossless", actions=("retain", "recompute")),
    "adacc_compiled": Method(title="Adacc in torch.compile", install=install_adacc_compiled, takes_budget=True),
}

PEERS: dict[str, Method] = {
    "plain": PLAIN,
    "checkpointing": CHECKPOINTING,
    "checkpointing_offload": Method(
        title="HF checkpointing with offload", install=install_offload, obstacle=need_host_memory_elsewhere
    ),
    "trl_offloading": Method(title="trl activation offloading", install=install_trl_offloading, obstacle=need_trl),
    "selective": Method(title="selective checkpointing (products, attention)", install=install_selective),
    **{
        f"xformers_{share:g}": Method(
            title=f"xformers at {share:.0%} of a block",
            install=partial(install_xformers, share=share),
            obstacle=need_xformers,
        )
        for share in XFORMERS_BUDGETS
    },
    **{
        f"compile_{share:g}": Method(
            title=f"torch.compile, activation_memory_budget {share:g}", install=partial(install_compiled, share=share)
        )
        for share in COMPILE_BUDGETS
    },
    "adacc": ADACC,
    **ADACC_VARIANTS,
}
"""By the name that a record has for them."""
