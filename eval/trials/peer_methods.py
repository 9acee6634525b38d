"""Other ways to save activation memory for the same Transformers model, installed as their own users would.

Each method can give the reason why it cannot run on a device. The table shows this reason.
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
from adacc_hf.eval.trials.methods import ADACC as EAGER_ADACC
from adacc_hf.eval.trials.methods import (
    CHECKPOINTING,
    EXACT,
    PLAIN,
    Bench,
    Budget,
    InstalledMethod,
    Method,
    Promise,
    install_checkpointing,
    measure_steady_step,
)
from adacc_hf.torch_glue.compat import FLAG, SETTER, GradientCheckpointingLayer

COMPILE_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.05)
"""Values of `activation_memory_budget`: fractions of the bytes that the compiler saves by default. At 0 only inputs
are saved."""

MATCH_ROUNDS = 4
"""Maximum number of compilations in the search for the share whose peak equals a peer's."""
MATCH_SLACK = 0.03
"""Fraction of the peer's peak that may stay unused. A larger fraction would put Adacc at a disadvantage."""
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
"""Operators whose outputs selective checkpointing usually saves: matrix products and fused attention. Attention with
dropout is recomputed: if a second forward skipped it, later operators would draw different dropout masks."""


def install_offload(bench: Bench, budget: Budget | None) -> InstalledMethod:
    """Install checkpointing that offloads the saved block inputs to host memory."""
    return install_checkpointing(bench, budget, offload=True)


def install_selective(bench: Bench, budget: Budget | None) -> InstalledMethod:
    """Install torch's eager selective checkpointing around each block. Only outputs of SAVED_OPERATORS are saved."""
    contexts = partial(create_selective_checkpoint_contexts, _save_products)
    getattr(bench.model, SETTER)(True, partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return InstalledMethod(call=bench.model, promise=Promise.EXACT)


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = operator in SAVED_OPERATORS and not _has_dropout(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in operator._schema.arguments]
    return (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) > 0.0


def install_trl_offloading(bench: Bench, budget: Budget | None) -> InstalledMethod:
    """Install trl's activation offloading, entered around forward as in its trainers."""
    from trl.models.activation_offloading import OffloadActivations

    def call(**batch: torch.Tensor) -> Any:
        with OffloadActivations():
            return bench.model(**batch)

    return InstalledMethod(call=call, promise=Promise.EXACT)


def install_xformers(bench: Bench, budget: Budget | None, share: float) -> InstalledMethod:
    """Install xformers' selective checkpointing: its solver finds each block's policy for `share` of the block's
    memory.

    The solver of xformers takes positional arguments only, and a block of Transformers takes keywords. So the
    checkpoint function of xformers replaces the one of Transformers, which is called with the keywords bound.
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
        vars(block)["_gradient_checkpointing_func"] = checkpoint_function()
        setattr(block, FLAG, True)
    return InstalledMethod(call=bench.model, promise=Promise.EXACT)


def install_compiled(bench: Bench, budget: Budget | None, share: float) -> InstalledMethod:
    """Install torch.compile with a budget for activations."""
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = share
    return InstalledMethod(call=torch.compile(bench.model), promise=Promise.OWN_RANDOMNESS)


def install_adacc_compiled(bench: Bench, budget: Budget | None) -> InstalledMethod:
    """Install torch.compile with Adacc's partitioner, which may also compress.

    An integer budget bounds the peak of a whole step. The largest share within this budget is searched. Raise
    OverLimitError if no share fits.
    """
    from adacc_hf.compiler import AdaccPartitioner
    from adacc_hf.compiler.backend import InstalledPartitioner, adacc

    if isinstance(budget, float):
        options: dict[str, Any] = {"memory_budget": budget}
        compiled = torch.compile(bench.model, backend=adacc, options=options)
        return InstalledMethod(call=compiled, promise=Promise.OWN_LOSSY)
    assert isinstance(budget, int), "peers pass fractions, or measured bytes"
    installed = InstalledPartitioner(AdaccPartitioner(memory_budget=1.0))
    compiled = torch.compile(bench.model)
    with _zero_learning_rates(bench.optimizer):
        share = _share_within(bench, compiled, installed, budget)
    return InstalledMethod(call=compiled, promise=Promise.OWN_LOSSY, facts={"share": share})


def _share_within(bench: Bench, call: Callable[..., Any], installed: Any, budget_bytes: int) -> float:
    """Find and set the share of the compiler's default bytes whose step peak is closest below the budget. Return the
    share."""
    fitting_share, share, peak_bytes = None, 1.0, 0
    for _ in range(MATCH_ROUNDS):
        installed.partitioner.start_over(share)
        installed.compile_again()
        _, peak_bytes = measure_steady_step(bench, call)
        unused_bytes = budget_bytes - peak_bytes
        if unused_bytes >= 0:
            fitting_share = share
            if share >= 1.0 or unused_bytes <= MATCH_SLACK * budget_bytes:
                return share
        policy = installed.partitioner.policy
        margin = 0 if unused_bytes >= 0 else MATCH_SLACK / 3 * policy.plain_bytes
        share = min(1.0, max((policy.stored_bytes + unused_bytes - margin) / policy.plain_bytes, MIN_SHARE))
    if fitting_share is None:
        raise OverLimitError(
            f"no share of torch.compile's bytes fits into {format_bytes(budget_bytes)}: the last of {MATCH_ROUNDS} "
            f"tried has a peak of {format_bytes(peak_bytes)}",
            {"peak_bytes": peak_bytes},
        )
    installed.partitioner.start_over(fitting_share)
    installed.compile_again()
    return fitting_share


@contextmanager
def _zero_learning_rates(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set learning rates to 0 while open. Steps take all their memory, but the weights stay valid for comparing
    gradients."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def offload_obstacle(device: str) -> str | None:
    return "activations are in host memory already: run this method with --device cuda" if device == "cpu" else None


def trl_obstacle(device: str) -> str | None:
    if device == "cpu":
        return "trl offloads activations from an accelerator to the host: run this method with --device cuda"
    return missing_package("trl")


def xformers_obstacle(device: str) -> str | None:
    if device == "cpu":
        return "xformers times operators on a CUDA device: run this method with --device cuda"
    return missing_package("xformers") or missing_package("scipy")


def missing_package(name: str) -> str | None:
    """Return instructions to install the package if it is missing, else None."""
    return None if importlib.util.find_spec(name) else f"{name} is not installed: pip install 'adacc-hf[peers]'"


COMPILED_PEERS: dict[str, Method] = {
    f"compile_{share:g}": Method(
        title=f"torch.compile, activation_memory_budget {share:g}",
        install=partial(install_compiled, share=share),
        is_compiled=True,
    )
    for share in COMPILE_BUDGETS
}

ADACC: dict[str, Method] = {
    "adacc": EAGER_ADACC,
    "adacc_exact": EXACT,
    "adacc_compiled": Method(
        title="Adacc in torch.compile", install=install_adacc_compiled, takes_budget=True, is_compiled=True
    ),
}

PEERS: dict[str, Method] = {
    "plain": PLAIN,
    "checkpointing": CHECKPOINTING,
    "checkpointing_offload": Method(
        title="HF checkpointing with offload", install=install_offload, obstacle=offload_obstacle
    ),
    "trl_offloading": Method(title="trl activation offloading", install=install_trl_offloading, obstacle=trl_obstacle),
    "selective": Method(title="selective checkpointing (products, attention)", install=install_selective),
    **{
        f"xformers_{share:g}": Method(
            title=f"xformers at {share:.0%} of a block",
            install=partial(install_xformers, share=share),
            obstacle=xformers_obstacle,
        )
        for share in XFORMERS_BUDGETS
    },
    **COMPILED_PEERS,
    **ADACC,
}
"""Methods by their name in records."""
