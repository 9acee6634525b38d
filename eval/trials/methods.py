"""Methods to save activations, by name: the paper's five, and exact Adacc.

A method is installed once, on a model that has trained one step, so that the optimizer's state exists and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.eval.trials.model_under_test import Batch, Subject
from adacc_hf.kernels.codecs import BASELINE, get_codec
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import static_bytes
from adacc_hf.torch_glue.meters import MemoryMeter

Budget = str | float | int


class Promise(str, Enum):
    """A method's promise about its gradients, which is checked before timing."""

    EXACT = "exact"
    """Plain training's gradients, bit for bit."""
    LOSSY = "lossy"
    """Plain training's gradients, up to the codecs' error. The loss is equal."""
    OWN_RANDOMNESS = "own_randomness"
    """Gradients of the method's own loss: the method draws dropout masks that differ from plain training's, and rounds
    differently."""
    OWN_LOSSY = "own_lossy"
    """Gradients of the method's own loss, up to the codecs' error."""

    @property
    def is_own(self) -> bool:
        """Return True if plain training's gradients cannot serve as the reference for this method."""
        return self in (Promise.OWN_RANDOMNESS, Promise.OWN_LOSSY)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Model, batch and optimizer that a method is installed on."""

    subject: Subject
    model: PreTrainedModel
    batch: Batch
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class InstalledMethod:
    """Method installed on a model."""

    call: nn.Module | Callable[..., Any]
    """Callable in place of the model, with the model's parameters."""
    promise: Promise
    other_sums: bool = False
    """True if the method adds numbers in a different order from plain training, so that its promise holds up to
    rounding."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The method's decisions, for the record."""


def measure_steady_step(bench: Bench, call: Callable[..., Any]) -> tuple[int, int]:
    """Measure the static bytes, and the peak of a whole training step in the steady state, static bytes included."""
    for _ in range(2):  # the first two calls at a shape are recorded
        bench.subject.train_step(call, bench.batch, bench.optimizer)
    live_bytes = static_bytes(bench.model, bench.batch, bench.optimizer)
    with MemoryMeter.for_device(torch.device(bench.subject.device)) as meter:
        bench.subject.train_step(call, bench.batch, bench.optimizer)
    return live_bytes, live_bytes + meter.peak_bytes


Install = Callable[[Bench, Budget | None], InstalledMethod]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to save activation memory."""

    title: str
    install: Install
    """Function that installs the method on a bench within a budget."""
    takes_budget: bool = False
    is_compiled: bool = False
    """True if the method compiles the model, and so draws other dropout masks than plain training."""
    obstacle: Callable[[str], str | None] = lambda device: None
    """Function from a device to the reason why the method cannot run there, or None."""


def install_plain(bench: Bench, budget: Budget | None) -> InstalledMethod:
    """Install nothing: plain training."""
    return InstalledMethod(call=bench.model, promise=Promise.EXACT)


def install_checkpointing(bench: Bench, budget: Budget | None, **options: Any) -> InstalledMethod:
    """Install the checkpointing of Transformers, as TrainingArguments enable it."""
    switch_checkpointing(bench.model, on=True, **options)
    return InstalledMethod(call=bench.model, promise=Promise.EXACT)


def uses_lossy_codec(policy: Policy) -> bool:
    """Return True if decoding changes any activation."""
    codecs = {(choice.codec, choice.options) for plan in policy.plans for _, choice in plan.choices}
    return any(codec is not None and not get_codec(codec, **dict(options)).lossless for codec, options in codecs)


def install_policy(
    bench: Bench,
    budget: Budget | None,
    config: AdaccConfig,
    solve: Callable[[Profile, Budget, AdaccConfig], Policy] = solve_policy,
) -> InstalledMethod:
    """Solve a policy for this bench and install it. Raise InfeasibleBudgetError if no policy fits."""
    with bench.subject.autocast():
        profile = profile_model(bench.model, bench.batch, config, bench.optimizer)
    policy = solve(profile, config.memory_budget if budget is None else budget, config)
    apply_policy(bench.model, policy, config)
    return InstalledMethod(
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
    """Return the method Adacc with these settings of AdaccConfig."""
    return Method(title=title, install=partial(install_policy, config=AdaccConfig(**config)), takes_budget=True)


PLAIN = Method(title="plain", install=install_plain)
CHECKPOINTING = Method(title="HF gradient checkpointing", install=install_checkpointing)
NAIVE = AdaccConfig(actions=("retain", "compress"), codecs=(BASELINE,))
QUANTIZATION = Method(
    title="naive quantization",
    install=partial(
        install_policy,
        config=NAIVE,
        solve=lambda profile, budget, config: uniform_policy(profile, "compress", BASELINE),
    ),
)
ADACC = adacc("Adacc")
EXACT = adacc("Adacc, exact", exact=True)


PAPER_METHODS = {
    "none": PLAIN,
    "full": CHECKPOINTING,
    "quantization": QUANTIZATION,
    "adacc": ADACC,
    "adacc_no_outlier": adacc("Adacc w/o outlier", outliers=False),
}
"""The paper's methods by their names on the command line, in the order of its tables."""

METHODS = {**PAPER_METHODS, "adacc_exact": EXACT}
"""The paper's methods, and exact Adacc."""
