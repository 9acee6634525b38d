"""Live bytes and times of whole training steps with low-rank optimizers, on LLaMA shapes.

Each measurement runs in its own process.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adacc_hf import AdaccConfig, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.planning import Request, plan
from adacc_hf.eval.records.clock import CLOCKS
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.repository.low_rank import METHODS
from adacc_hf.eval.trials.isolation import CannotRunError, run_here
from adacc_hf.eval.trials.workload import Batch, random_text
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json
from adacc_hf.torch_glue.memory import (
    MemoryMeter,
    backward,
    forward_loss,
    static_bytes,
)

ADACC = "adacc"
"""Method name of AdamW with Adacc, whose budget is the peak of another method."""
STEPS_BEFORE = 2
"""Steps before measuring. The first creates the optimizer's state and GaLore's subspaces. In the second, Adacc's codecs
find their outlier channels."""


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a LLaMA and its batch."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int = 32_000
    batch: int = 2
    tokens: int = 256

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=1024,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )

    def model(self, seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(self.config).train()

    def example(self, seed: int) -> Batch:
        ids = random_text(self.batch, self.tokens, torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids.clone()}


@dataclass(kw_only=True)
class LowRankTraining:
    """Model in training by one method."""

    model: LlamaForCausalLM
    batch: Batch
    optimizer: torch.optim.Optimizer
    policy: Policy | None = None
    first_peak_bytes: int = field(init=False)
    """Peak of the first step, which creates the optimizer's state."""

    def step(self) -> None:
        """Run forward, backward and optimizer step."""
        backward(forward_loss(self.model, self.batch))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def static_bytes(self) -> int:
        return static_bytes(self.model, self.batch, self.optimizer)

    def peak_bytes(self) -> int:
        """Return the maximum of the bytes live during a step."""
        live_bytes = self.static_bytes()
        with MemoryMeter.for_device(torch.device("cpu")) as meter:
            self.step()
        return live_bytes + meter.peak_bytes


def install(shape: LlamaShape, method: str, budget_bytes: int | None, seed: int) -> LowRankTraining:
    """Return a model in its steady state under `method`. With ADACC, `budget_bytes` is the budget.

    Raise CannotRunError if a package is missing, and InfeasibleBudgetError if the budget is too small.
    """
    low_rank_method = METHODS["plain" if method == ADACC else method]
    model = shape.model(seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "seed": seed}
        optimizer = low_rank_method.trainer(model, folder, **arguments).create_optimizer()
    training = LowRankTraining(model=model, batch=shape.example(seed), optimizer=optimizer)
    training.first_peak_bytes = training.peak_bytes()
    budget = budget_bytes if method == ADACC else low_rank_method.adacc_share
    if budget is not None:
        config = AdaccConfig()
        profile = profile_model(model, training.batch, config, optimizer)
        training.policy = solve_policy(profile, budget, config)
        apply_policy(model, training.policy, config)
    for _ in range(STEPS_BEFORE - 1):
        training.step()
    return training


def measure_shape(
    shape: Figures,
    layers: int,
    batch: int,
    methods: list[str],
    peer: str,
    parts: Figures,
    plan_batch: int,
    seed: int = 0,
    threads: int = 1,
) -> Figures:
    """Measure the "memory" of whole steps of `methods` on a model of only `layers` layers, and predict "plans" for the
    whole model.

    Adacc's budget is the peak of `peer`, which is measured before it. `parts` has the planned rank of each method, as a
    fraction of the inputs, or None for AdamW.
    """
    torch.set_num_threads(threads)
    full_shape = LlamaShape(**shape)
    cut_shape = replace(full_shape, layers=layers, batch=batch)
    memory: dict[str, Figures] = {}
    for method in methods:
        budget = memory[peer].get("peak_bytes") if method == ADACC else None
        memory[method] = run_here(
            step_memory, {"shape": cut_shape, "method": method, "budget_bytes": budget, "seed": seed}
        )
    planned_shape = replace(full_shape, batch=plan_batch)
    plans = {method: plan_peak(planned_shape, part, "fp32") for method, part in parts.items()}
    return {"memory": memory, "plans": plans, "bf16_plan": plan_peak(planned_shape, None, "bf16")}


def step_memory(shape: LlamaShape, method: str, budget_bytes: int | None, seed: int) -> Figures:
    """Measure the static bytes and the peak of a whole step of one method."""
    training = install(shape, method, budget_bytes, seed)
    return {
        "static_bytes": training.static_bytes(),
        "peak_bytes": training.peak_bytes(),
        "first_peak_bytes": training.first_peak_bytes,
    }


def plan_peak(shape: LlamaShape, part: float | None, precision: str) -> Figures:
    """Predict by `adacc plan` the peak of plain training, or of CompAct with a rank of `part` of the inputs.

    In this project q, k and v share one projection, and so do gate and up. In the paper each has its own projection,
    which stores 3 * rank more numbers for each token and block.
    """
    workload = Workload(
        config=shape.config, device=find_device("h200"), precision=PRECISIONS[precision], compact_rank=part
    )
    answer = plan(
        Request(
            model="llama",
            workload=workload,
            batch_size=shape.batch,
            seq_len=shape.tokens,
            optimizer="adamw" if part is None else "compact",
            find_largest=False,
        )
    )
    peak_bytes = answer.forecasts["plain"].peak_bytes
    rank = 0 if part is None else round(part * shape.width)
    separate_projection_bytes = (
        3 * rank * workload.precision.compute.itemsize * shape.batch * shape.tokens * shape.layers
    )
    return {"shared_peak_bytes": peak_bytes, "peak_bytes": peak_bytes + separate_projection_bytes}


def time_steps(
    shape: Figures, methods: list[str], peer: str, rounds: int, clock: str, seed: int = 0, threads: int = 1
) -> Figures:
    """Time whole steps of `methods` in turn, in milliseconds, and also of Adacc, whose budget is the peak of `peer`.

    `peer` is one of `methods`. Methods whose package is missing are left out.
    """
    torch.set_num_threads(threads)
    llama_shape = LlamaShape(**shape)
    trainings = {}
    for name in methods:
        with suppress(CannotRunError):
            trainings[name] = install(llama_shape, name, None, seed)
    peaks = {name: training.peak_bytes() for name, training in trainings.items()}
    trainings[ADACC] = install(llama_shape, ADACC, peaks[peer], seed)
    peaks[ADACC] = trainings[ADACC].peak_bytes()
    samples: dict[str, list[float]] = {name: [] for name in trainings}
    order = deque(trainings)
    now = CLOCKS[clock]
    for _ in range(rounds):
        for name in order:
            samples[name].append(_ms(trainings[name].step, now))
        order.rotate(1)
    base = samples["plain"]
    return {
        name: to_json(
            {
                "step_ms": Spread.of(times),
                "of_plain": statistics.median(times) / statistics.median(base),
                "of_plain_by_round": Spread.of([own / other for own, other in zip(times, base, strict=True)]),
                "peak_bytes": peaks[name],
                **_drawing(trainings[name], now),
            }
        )
        for name, times in samples.items()
    }


def _drawing(training: LowRankTraining, now: Callable[[], float]) -> Figures:
    """Return (time of a step in which GaLore computes its subspaces, number of steps from one such step to the
    next)."""
    projectors = [state["projector"] for state in training.optimizer.state.values() if "projector" in state]
    if not projectors:
        return {}
    gap = projectors[0].update_proj_gap
    for projector in projectors:
        projector.update_proj_gap = 1
    return {"drawing_ms": _ms(training.step, now), "drawing_gap": gap}


def _ms(step: Callable[[], None], now: Callable[[], float]) -> float:
    return 1e3 * seconds_of(step, torch.device("cpu"), now)
