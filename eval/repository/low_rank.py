"""Comparison of low-rank optimizers with other optimizers: live bytes and times of training steps on LLaMA shapes.

Each measurement runs in its own process.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from adacc_hf import AdaccCallback, AdaccConfig, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.compact import CompactFactory
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.planning import Request, plan
from adacc_hf.eval.records.command_line import CLOCKS
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.trials.isolation import CannotRunError, run_here
from adacc_hf.eval.trials.peer_methods import missing_package
from adacc_hf.eval.trials.workload import Batch, random_text
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json
from adacc_hf.torch_glue.memory import (
    MemoryMeter,
    backward,
    forward_loss,
    static_bytes,
)

ADACC_SHARE = 0.5
"""Adacc's budget in combination with CompAct, as a fraction of the bytes that a step stores."""
PLAIN_RATE, LOW_RANK_RATE = 3e-3, 1e-2
"""Learning rates of AdamW, and of methods that scale their step down (the value of all three papers)."""


@dataclass(frozen=True, kw_only=True)
class LowRankMethod:
    """Optimizer, with or without Adacc."""

    title: str
    rate: float = LOW_RANK_RATE
    transformers: str | None = None
    """Name of the optimizer in Transformers. None for AdamW."""
    options: Mapping[str, float | str] = field(default_factory=dict)
    """Transformers' `optim_args` other than the rank, or CompactFactory's settings."""
    part: float = 0.25
    """Rank, as a fraction of the layers' inputs."""
    is_compact: bool = False
    adacc_share: float | None = None
    package: str | None = None
    """Additional package that the method needs."""

    @property
    def callbacks(self) -> list[TrainerCallback]:
        if self.adacc_share is None:
            return []
        return [AdaccCallback(AdaccConfig(memory_budget=self.adacc_share, tracking="off"))]

    def check(self) -> None:
        """Raise CannotRunError if a package is missing."""
        if self.package is not None and (missing := missing_package(self.package)):
            raise CannotRunError(missing)

    def trainer(
        self,
        model: PreTrainedModel,
        folder: str,
        data: Dataset[Any] | None = None,
        held_out: Dataset[Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **arguments: Any,
    ) -> Trainer:
        """Return a Trainer of `model` by this method, with the papers' settings."""
        self.check()
        settings: dict[str, Any] = {
            "learning_rate": self.rate,
            "weight_decay": 0.0,
            "report_to": "none",
            "disable_tqdm": True,
        }
        if self.transformers is not None:
            width = model.config.hidden_size
            options = {"rank": round(self.part * width), **self.options}
            settings |= {
                "optim": self.transformers,
                "optim_args": ", ".join(f"{name}={value}" for name, value in options.items()),
                # The choice of GaLore's authors: all linear layers of attention and MLP.
                "optim_target_modules": r".*(attn|attention|mlp|intermediate|output)\..*",
            }
        compact: Any = None  # a factory, which Trainer's type annotation does not include
        if self.is_compact:
            rate = arguments.get("learning_rate", self.rate)
            compact = CompactFactory, {"rank": self.part, "lr": rate, **self.options}
        return Trainer(
            model=model,
            args=TrainingArguments(output_dir=folder, **{**settings, **arguments}),
            train_dataset=data,
            eval_dataset=held_out,
            callbacks=[*self.callbacks, *(callbacks or [])],
            optimizer_cls_and_kwargs=compact,
        )


GALORE: dict[str, float | str] = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
APOLLO: dict[str, float | str] = {"update_proj_gap": 200, "scale": 1.0, "proj": "random", "scale_type": "channel"}


def _compact(part: float, **more: Any) -> LowRankMethod:
    return LowRankMethod(title=f"CompAct n/{round(1 / part)}", is_compact=True, part=part, **more)


METHODS = {
    "plain": LowRankMethod(title="AdamW", rate=PLAIN_RATE),
    "galore": LowRankMethod(title="GaLore n/4", transformers="galore_adamw", options=GALORE, package="galore_torch"),
    "galore_layerwise": LowRankMethod(
        title="GaLore n/4, layer-wise",
        transformers="galore_adamw_layerwise",
        options=GALORE,
        package="galore_torch",
    ),
    "apollo": LowRankMethod(title="APOLLO n/4", transformers="apollo_adamw", options=APOLLO, package="apollo_torch"),
    "compact_2": _compact(0.5),
    "compact_4": _compact(0.25),
    "compact_8": _compact(0.125),
    "compact_4_adacc": LowRankMethod(
        title="CompAct n/4 with Adacc", is_compact=True, part=0.25, adacc_share=ADACC_SHARE
    ),
}
"""Methods by their name in records. n is the width of the model, or for CompAct the width of a layer's inputs."""


# Measurements of whole training steps.

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
