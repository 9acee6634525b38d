"""Live bytes and time of whole steps by optimizers of low rank, on LLaMA shapes. Each runs in a process of its own."""

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
from adacc_hf.eval.trials.isolation import CannotRunError, run_here
from adacc_hf.eval.trials.low_rank import METHODS, made_by
from adacc_hf.eval.trials.workload import Batch, random_text
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json
from adacc_hf.torch_glue.memory import MemoryMeter, backward, forward_loss, static_bytes

ADACC = "adacc"
"""AdamW with Adacc, at the peak of another method."""
STEPS_BEFORE = 2
"""The first makes the optimizer's state, and GaLore's subspaces; in the second, Adacc's codecs learn their channels."""


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A LLaMA and its batch."""

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
class Trained:
    """A model that trains by one method."""

    model: LlamaForCausalLM
    batch: Batch
    optimizer: torch.optim.Optimizer
    policy: Policy | None = None
    first_peak_bytes: int = field(init=False)
    """Of the first step, which makes the optimizer's state."""

    def step(self) -> None:
        """Forward, backward, optimizer step."""
        backward(forward_loss(self.model, self.batch))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def static_bytes(self) -> int:
        return static_bytes(self.model, self.batch, self.optimizer)

    def peak_bytes(self) -> int:
        """Most bytes live at any moment of a step."""
        live_bytes = self.static_bytes()
        with MemoryMeter.for_device(torch.device("cpu")) as meter:
            self.step()
        return live_bytes + meter.peak_bytes


def install(shape: LlamaShape, method: str, budget_bytes: int | None, seed: int) -> Trained:
    """A model in its steady state by `method`; ADACC keeps to `budget_bytes`.

    Raises CannotRunError without the package that it needs, and InfeasibleBudgetError.
    """
    chosen = METHODS["plain" if method == ADACC else method]
    model = shape.model(seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "seed": seed}
        optimizer = made_by(chosen.trainer(model, folder, **arguments))
    trained = Trained(model=model, batch=shape.example(seed), optimizer=optimizer)
    trained.first_peak_bytes = trained.peak_bytes()
    budget = budget_bytes if method == ADACC else chosen.adacc_share
    if budget is not None:
        config = AdaccConfig()
        profile = profile_model(model, trained.batch, config, optimizer)
        trained.policy = solve_policy(profile, budget, config)
        apply_policy(model, trained.policy, config)
    for _ in range(STEPS_BEFORE - 1):
        trained.step()
    return trained


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
    """The "memory" of whole steps of `methods` on the shape cut to `layers`, and "plans" of the whole model.

    Adacc's budget is the peak of `peer`, which comes before it. `parts` has the rank that is planned, by method: a part
    of the inputs, or None for AdamW.
    """
    torch.set_num_threads(threads)
    whole = LlamaShape(**shape)
    cut = replace(whole, layers=layers, batch=batch)
    memory: dict[str, Figures] = {}
    for method in methods:
        budget = memory[peer].get("peak_bytes") if method == ADACC else None
        memory[method] = run_here(step_memory, {"shape": cut, "method": method, "budget_bytes": budget, "seed": seed})
    planned = replace(whole, batch=plan_batch)
    plans = {method: plan_peak(planned, part, "fp32") for method, part in parts.items()}
    return {"memory": memory, "plans": plans, "bf16_plan": plan_peak(planned, None, "bf16")}


def step_memory(shape: LlamaShape, method: str, budget_bytes: int | None, seed: int) -> Figures:
    """Bytes at rest and the peak of a whole step of one method."""
    trained = install(shape, method, budget_bytes, seed)
    return {
        "static_bytes": trained.static_bytes(),
        "peak_bytes": trained.peak_bytes(),
        "first_peak_bytes": trained.first_peak_bytes,
    }


def plan_peak(shape: LlamaShape, part: float | None, precision: str) -> Figures:
    """The peak that `adacc plan` tells of plain training, or of CompAct's at a part of the inputs.

    Our layers share one projection among q, k and v, and among gate and up; the paper's have one each, which stores
    three times r numbers more for each token and block.
    """
    workload = Workload(
        config=shape.config, device=find_device("h200"), precision=PRECISIONS[precision], compact_rank=part
    )
    planned = plan(
        Request(
            model="llama",
            workload=workload,
            batch_size=shape.batch,
            seq_len=shape.tokens,
            optimizer="adamw" if part is None else "compact",
            find_largest=False,
        )
    )
    peak_bytes = planned.forecasts["plain"].peak_bytes
    rank = 0 if part is None else round(part * shape.width)
    own = 3 * rank * workload.precision.compute.itemsize * shape.batch * shape.tokens * shape.layers
    return {"shared_peak_bytes": peak_bytes, "peak_bytes": peak_bytes + own}


def time_steps(
    shape: Figures, methods: list[str], peer: str, rounds: int, clock: str, seed: int = 0, threads: int = 1
) -> Figures:
    """Milliseconds of whole steps of `methods` in turn, and of Adacc at the peak of `peer`, which is among them.

    Methods whose package is missing are left out.
    """
    torch.set_num_threads(threads)
    what = LlamaShape(**shape)
    found = {}
    for name in methods:
        with suppress(CannotRunError):
            found[name] = install(what, name, None, seed)
    peaks = {name: trained.peak_bytes() for name, trained in found.items()}
    found[ADACC] = install(what, ADACC, peaks[peer], seed)
    peaks[ADACC] = found[ADACC].peak_bytes()
    samples: dict[str, list[float]] = {name: [] for name in found}
    order = deque(found)
    now = CLOCKS[clock]
    for _ in range(rounds):
        for name in order:
            samples[name].append(_ms(found[name].step, now))
        order.rotate(1)
    base = samples["plain"]
    return {
        name: to_json(
            {
                "step_ms": Spread.of(times),
                "of_plain": statistics.median(times) / statistics.median(base),
                "of_plain_by_round": Spread.of([own / other for own, other in zip(times, base, strict=True)]),
                "peak_bytes": peaks[name],
                **_drawing(found[name], now),
            }
        )
        for name, times in samples.items()
    }


def _drawing(trained: Trained, now: Callable[[], float]) -> Figures:
    """The time of a step in which GaLore finds its subspaces, and after how many steps the next such one comes."""
    projectors = [state["projector"] for state in trained.optimizer.state.values() if "projector" in state]
    if not projectors:
        return {}
    gap = projectors[0].update_proj_gap
    for projector in projectors:
        projector.update_proj_gap = 1
    return {"drawing_ms": _ms(trained.step, now), "drawing_gap": gap}


def _ms(step: Callable[[], None], now: Callable[[], float]) -> float:
    return 1e3 * seconds_of(step, torch.device("cpu"), now)
