"""What else saves activation memory for the same Transformers model, installed as its own users would.

Each says what it lacks on a device, so that a table can show the reason in its row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.trials.isolation import OverLimitError
from adacc_hf.eval.trials.methods import (
    ADACC,
    CHECKPOINTING,
    LOSSLESS,
    PLAIN,
    Bench,
    Budget,
    Installed,
    Method,
    Promise,
    install_checkpointing,
    measure_steady_step,
)
from adacc_hf.torch_glue.compat import FLAG, FUNCTION, SETTER, GradientCheckpointingLayer

COMPILE_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.05)
"""Settings of `activation_memory_budget`: the share of what the compiler's default saves. At 0 it saves inputs only."""

MATCH_ROUNDS = 4
"""Compilations in search of the share whose peak is a rival's."""
MATCH_SLACK = 0.03
"""Part of the rival's peak that may be left unused: more would be a handicap of our own making."""
MIN_SHARE = 0.01

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
"""Matrix products and fused attention: what selective checkpointing usually saves. Not attention with dropout: a second
forward that leaves it out draws other masks after it."""


def install_offload(bench: Bench, budget: Budget | None) -> Installed:
    """Checkpointing whose saved block inputs live in host memory."""
    return install_checkpointing(bench, budget, offload=True)


def install_selective(bench: Bench, budget: Budget | None) -> Installed:
    """torch's eager selective checkpointing around each block, saving SAVED_OPERATORS."""
    contexts = partial(create_selective_checkpoint_contexts, _save_products)
    getattr(bench.model, SETTER)(True, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return Installed(call=bench.model, promise=Promise.EXACT)


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator in SAVED_OPERATORS and not _has_dropout(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in operator._schema.arguments]
    return (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) > 0.0


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
    """torch.compile with our partitioner, which may compress too.

    A whole number is what a whole step may take: the largest share that keeps to it is looked for. Raises
    OverLimitError if none does.
    """
    from adacc_hf.compiler import AdaccPartitioner
    from adacc_hf.compiler.backend import InstalledPartitioner, adacc

    if isinstance(budget, float):
        options: dict[str, Any] = {"memory_budget": budget}
        compiled = torch.compile(bench.model, backend=adacc, options=options)
        return Installed(call=compiled, promise=Promise.OWN_LOSSY)
    assert isinstance(budget, int), "peers give fractions, or bytes that were measured"
    installed = InstalledPartitioner(AdaccPartitioner(memory_budget=1.0))
    compiled = torch.compile(bench.model)
    with _learning_nothing(bench.optimizer):
        share = _share_within(bench, compiled, installed, budget)
    return Installed(call=compiled, promise=Promise.OWN_LOSSY, facts={"share": share})


def _share_within(bench: Bench, call: Callable[..., Any], installed: Any, budget_bytes: int) -> float:
    """The share of the compiler's default bytes, now in force, at which a step's peak comes closest below a budget."""
    fitting, share, peak_bytes = None, 1.0, 0
    for _ in range(MATCH_ROUNDS):
        installed.partitioner.start_over(share)
        installed.compile_again()
        _, peak_bytes = measure_steady_step(bench, call)
        left = budget_bytes - peak_bytes
        if left >= 0:
            fitting = share
            if share >= 1.0 or left <= MATCH_SLACK * budget_bytes:
                return share
        policy = installed.partitioner.policy
        margin = 0 if left >= 0 else MATCH_SLACK / 3 * policy.plain_bytes
        share = min(1.0, max((policy.stored_bytes + left - margin) / policy.plain_bytes, MIN_SHARE))
    if fitting is None:
        raise OverLimitError(
            f"no share of torch.compile's bytes that was tried keeps to {format_bytes(budget_bytes)}",
            {"peak_bytes": peak_bytes},
        )
    installed.partitioner.start_over(fitting)
    installed.compile_again()
    return fitting


@contextmanager
def _learning_nothing(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps that take all their memory and leave the weights as they are: gradients are compared with earlier ones."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


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
    "adacc_lossless": LOSSLESS,
    "adacc_compiled": Method(title="Adacc in torch.compile", install=install_adacc_compiled, takes_budget=True),
}

COMPILED_PEERS: dict[str, Method] = {
    f"compile_{share:g}": Method(
        title=f"torch.compile, activation_memory_budget {share:g}", install=partial(install_compiled, share=share)
    )
    for share in COMPILE_BUDGETS
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
    **COMPILED_PEERS,
    "adacc": ADACC,
    **ADACC_VARIANTS,
}
"""By the name that a record has for them."""
