"""Ways to keep activations, by name: the paper's five, Adacc without loss, and those that share a headline.

A method is installed once, on a model that has trained a step, so that the optimizer's state is there to be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.config import Budget as ResolvedBudget
from adacc_hf.artifacts.profile import Profile
from adacc_hf.eval.trials.contenders import uses_lossy_codec
from adacc_hf.eval.trials.model_under_test import Subject
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.kernels.codecs import baseline_codec
from adacc_hf.solve.baselines import quantize_everything
from adacc_hf.solve.simple_policies import policy_of_plans, uniform_policy
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import MemoryMeter, static_bytes

Budget = str | float | int


class Promise(str, Enum):
    """What a method promises about gradients, which is what it is held to before it is timed."""

    EXACT = "exact"
    """Those of plain training, bit for bit."""
    LOSSY = "lossy"
    """Those of plain training, as far as codecs allow; the loss is equal."""
    OWN_RANDOMNESS = "own_randomness"
    """Those of its own loss: it draws other dropout masks than plain training, and rounds differently."""
    OWN_LOSSY = "own_lossy"
    """Those of its own loss, as far as codecs allow."""

    @property
    def is_own(self) -> bool:
        """Whether there are no gradients of plain training to compare with."""
        return self in (Promise.OWN_RANDOMNESS, Promise.OWN_LOSSY)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a method is installed on."""

    subject: Subject
    model: PreTrainedModel
    batch: Batch
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A method in force."""

    call: nn.Module | Callable[..., Any]
    """What is called in place of the model; shares its parameters."""
    promise: Promise
    other_sums: bool = False
    """Whether it adds up in another order than plain training, so that the promise holds but for rounding."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the method decided, for the record."""


def measure_steady_step(bench: Bench, call: Callable[..., Any]) -> tuple[int, int]:
    """Static bytes, and the peak of a whole training step in the steady state, static bytes included."""
    for _ in range(2):  # the first calls at a shape record it
        bench.subject.train_step(call, bench.batch, bench.optimizer)
    live_bytes = static_bytes(bench.model, bench.batch, bench.optimizer)
    with MemoryMeter.for_device(torch.device(bench.subject.device)) as meter:
        bench.subject.train_step(call, bench.batch, bench.optimizer)
    return live_bytes, live_bytes + meter.peak_bytes


Install = Callable[[Bench, Budget | None], Installed]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to keep activations."""

    title: str
    install: Install
    """Installs it on a bench within a budget."""
    takes_budget: bool = False
    obstacle: Callable[[str], str | None] = lambda device: None
    """Why it cannot run on a device; None if it can."""


def install_plain(bench: Bench, budget: Budget | None) -> Installed:
    """Plain training."""
    return Installed(call=bench.model, promise=Promise.EXACT)


def install_checkpointing(bench: Bench, budget: Budget | None, **options: Any) -> Installed:
    """The checkpointing of Transformers, as TrainingArguments switch it on."""
    switch_checkpointing(bench.model, on=True, **options)
    return Installed(call=bench.model, promise=Promise.EXACT)


def install_policy(
    bench: Bench,
    budget: Budget | None,
    config: AdaccConfig,
    solve: Callable[[Profile, Budget, AdaccConfig], Policy] = solve_policy,
) -> Installed:
    """A policy solved for this bench. Raises InfeasibleBudgetError."""
    with bench.subject.autocast():
        profile = profile_model(bench.model, bench.batch, config, bench.optimizer)
    policy = solve(profile, config.memory_budget if budget is None else budget, config)
    apply_policy(bench.model, policy, config)
    return Installed(
        call=bench.model,
        promise=Promise.LOSSY if uses_lossy_codec(policy) else Promise.EXACT,
        other_sums=policy.head == "chunked",
        facts={
            "head": policy.head,
            "predicted_stored_bytes": policy.predicted_stored_bytes,
            "plain_stored_bytes": profile.plain_stored_bytes,
            "predicted_peak_bytes": policy.predicted_peak_bytes,
            "predicted_overhead_ms": policy.predicted_overhead_ms,
            "actions": dict(policy.action_counts()),
            "num_plans": len(policy.plans),
        },
    )


def adacc(title: str, **config: Any) -> Method:
    """Adacc under a config."""
    return Method(title=title, install=partial(install_policy, config=AdaccConfig(**config)), takes_budget=True)


PLAIN = Method(title="plain", install=install_plain)
CHECKPOINTING = Method(title="HF gradient checkpointing", install=install_checkpointing)
NAIVE = AdaccConfig(actions=("retain", "compress"), codecs=(baseline_codec(),))
QUANTIZATION = Method(
    title="naive quantization",
    install=partial(
        install_policy,
        config=NAIVE,
        solve=lambda profile, budget, config: quantize_everything(profile),
    ),
)
ADACC = adacc("Adacc")
LOSSLESS = adacc("Adacc, lossless", actions=("retain", "recompute"))


def quantize_within(profile: Profile, budget: Budget, config: AdaccConfig) -> Policy:
    """The naive policy for as many blocks, the first ones first, as it takes to keep to `budget`; for all at most."""
    limit = ResolvedBudget.resolve(budget, profile, config)
    plain, coded = uniform_policy(profile, "retain"), quantize_everything(profile)
    names = [block.name for block in profile.blocks]
    policy = plain
    for number in range(len(names) + 1):
        plans = [(coded if i < number else plain).plan_of(name) for i, name in enumerate(names)]
        policy = policy_of_plans(profile, plans)
        if (policy.predicted_peak_bytes if limit.of_peak else policy.predicted_stored_bytes) <= limit.nbytes:
            break
    return policy


PAPER_METHODS = {
    "none": PLAIN,
    "full": CHECKPOINTING,
    "quantization": QUANTIZATION,
    "adacc": ADACC,
    "adacc_no_outlier": adacc("Adacc w/o outlier", outliers=False),
}
"""The paper's names on the command line, in the order of its tables."""

METHODS = {**PAPER_METHODS, "adacc_lossless": LOSSLESS}
"""Those, and Adacc where no bit may change."""

HEADLINE_METHODS = {
    "none": PLAIN,
    "full": CHECKPOINTING,
    "adacc": ADACC,
    "adacc_lossless": LOSSLESS,
    "quantization": Method(
        title="naive quantization of as many blocks as it takes",
        install=partial(install_policy, config=NAIVE, solve=quantize_within),
        takes_budget=True,
    ),
    "adacc_in_floor": replace(ADACC, title="Adacc at checkpointing's peak"),
}
"""What can be won, how much of it is, and what else may win some: all within one budget, but the last."""
