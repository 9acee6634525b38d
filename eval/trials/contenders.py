"""Methods to save activations, each on its own model, checked and then timed in turn.

Every contender has its own copy of the model with the method installed once. So a timed step is a step of steady
training, in which nothing is installed, recorded or compiled. Gradients are checked before anything is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from adacc_hf import Policy, apply_policy
from adacc_hf.eval.records.command_line import CLOCKS
from adacc_hf.eval.trials.gradients import (
    NOISE_RUNS,
    ROUNDING,
    Gradients,
    checked_error,
    compute_gradients,
    relative_error,
)
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread
from adacc_hf.torch_glue.memory import StepMemory, measure_step

PLAIN, CHECKPOINTING = "plain", "HF gradient checkpointing"

GATE_STEPS = 3
"""Steps whose gradients are checked: the first records the blocks, the second learns the order of backward, and the
third is steady. These steps also serve as warm-up."""


class Contender:
    """Method installed on its own copy of `model`."""

    def __init__(self, name: str, model: PreTrainedModel, batch: Batch, policy: Policy | None = None) -> None:
        self.name = name
        self.batch = batch
        self.policy = policy
        self.model = copy.deepcopy(model)
        if policy is not None:
            self.handle = apply_policy(self.model, policy)
        elif name == CHECKPOINTING:
            # The function that `activation_checkpointing_enable` calls; the public name depends on the release.
            self.model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def is_lossless(self) -> bool:
        return self.policy is None or not uses_lossy_codec(self.policy)

    @property
    def other_sums(self) -> bool:
        """Return True if the contender rounds sums differently from plain training, also in the loss. An example is a
        chunked head."""
        return self.policy is not None and self.policy.head == "chunked"

    def step(self) -> None:
        """Run one forward and backward. The optimizer's step is left out, because it is the same for all methods."""
        self.model(**self.batch).loss.backward()
        self.model.zero_grad(set_to_none=True)

    def gradients(self, seed: int) -> Gradients:
        return compute_gradients(self.model, self.batch, seed)

    def memory(self) -> StepMemory:
        return measure_step(self.model, self.batch)


def uses_lossy_codec(policy: Policy) -> bool:
    """Return True if decoding changes any activation."""
    codecs = {(choice.codec, choice.options) for plan in policy.plans for _, choice in plan.choices}
    return any(codec is not None and not get_codec(codec, **dict(options)).lossless for codec, options in codecs)


def check_gradients(contenders: Sequence[Contender]) -> dict[str, float]:
    """Return the largest relative gradient error of each contender against the first one, over the first GATE_STEPS
    steps.

    Raise WrongResultError if a lossless contender is not bit-equal, except for the noise between runs of the first
    contender and the rounding of another order of sums. Raise it also if a lossy contender's error is larger than its
    codecs explain.
    """
    worst = dict.fromkeys((contender.name for contender in contenders), 0.0)
    for seed in range(GATE_STEPS):
        expected = contenders[0].gradients(seed)
        noise = max(relative_error(expected, contenders[0].gradients(seed)) for _ in range(NOISE_RUNS - 1))
        for contender in contenders[1:]:
            error = checked_error(
                expected,
                contender.gradients(seed),
                noise=noise,
                rounding=ROUNDING["fp32"] if contender.other_sums or contender.device.type == "cuda" else 0.0,
                is_lossy=not contender.is_lossless,
                label=f"{contender.name}, step {seed + 1}, compared with {contenders[0].name}",
            )
            worst[contender.name] = max(worst[contender.name], error)
    return worst


def step_ms(contender: Contender, clock: str) -> float:
    """Return the milliseconds of one step of `contender` by `clock`."""
    return 1e3 * seconds_of(contender.step, contender.device, CLOCKS[clock])


def ratio_text(row: Mapping[str, Any], name: str, single: str = "round") -> str:
    """Format a ratio of medians, with the spread of the ratios of single rounds, steps or turns."""
    spread = Spread(**row[f"{name}_by_{single}"])
    return f"{row[name]:.2f} ({spread.low:.2f} to {spread.high:.2f})"
