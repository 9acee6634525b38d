"""Step times of whole trainings by the Trainer with the callback, on batches of changing sizes."""

from __future__ import annotations

import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from adacc_hf import AdaccCallback
from adacc_hf.callbacks.paper_methods import method_callbacks
from adacc_hf.eval.records.command_line import CLOCKS
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.contenders import CHECKPOINTING, PLAIN
from adacc_hf.eval.trials.length_cases import MODES, LengthCase, Scale, Size
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.price.timing import wait_for
from adacc_hf.reports.run_record import Settings, Spread

TRAINER = "trainer"
"""Name of the Trainer's case on the command line, and name of its model."""
TRAINER_MODEL = "llama_padded"

TRAINER_SCALE = Scale(batch=4, shortest=60, longest=400, steps=40)

LEFT_OUT = 4
"""Number of steps at the start of a training that are not counted. By default the policy is set after two steps, and
the first two steps under the policy are recorded."""


class SizedBatches(Dataset[Batch]):
    """Data set of one whole batch for each of `sizes`, made by `make(size, device, seed)`."""

    def __init__(self, make: Callable[[Size, str, int], Batch], sizes: Sequence[Size], seed: int) -> None:
        self.make, self.sizes, self.seed = make, sizes, seed

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Batch:
        return self.make(self.sizes[index], "cpu", self.seed + index)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Results of one training by the Trainer."""

    steps_ms: list[float]
    """Milliseconds of each counted step, including all work of the Trainer and its callbacks around it."""
    loss: float
    """Mean loss of all steps."""
    policy_step: int | None
    """Step after which the first policy was set. None without the callback."""
    num_policies: int


def measure_trainings(
    case: LengthCase, scale: Scale, budgets: Sequence[float], clock: str, settings: Settings
) -> dict[str, Any]:
    """Train by every method. Raise WrongResultError if a bit-equal method's loss differs from plain training's."""
    if scale.steps <= LEFT_OUT:
        raise ValueError(
            f"steps={scale.steps} must be more than {LEFT_OUT}, the number of first steps that are not counted"
        )
    sizes = case.draw(scale, settings.seed)
    methods = {PLAIN: method_callbacks("none", "auto"), CHECKPOINTING: method_callbacks("full", "auto")}
    configs = {
        f"{mode}, {budget:.0%} of plain": replace(config, memory_budget=budget)
        for budget in budgets
        for mode, config in MODES.items()
    }
    exact = {PLAIN, CHECKPOINTING, *(name for name, config in configs.items() if "compress" not in config.actions)}
    names = [*methods, *configs]
    data = SizedBatches(partial(case.make_batch, scale), sizes, settings.seed)

    def now() -> float:
        wait_for(torch.device(settings.device))  # else a step could still run during the next member's turn
        return CLOCKS[clock]()

    def run(name: str, turns: Turns, member: int) -> Training:
        callbacks, overrides = methods.get(name) or ([AdaccCallback(configs[name])], {})
        model = case.model(scale, settings.device, settings.seed)
        in_turn = StepInTurn(turns, member, now)
        return _train(model, data, callbacks, overrides, in_turn, settings)

    trainings = dict(zip(names, run_in_turn([partial(run, name) for name in names], settings.threads), strict=True))
    check_trainings({name: trainings[name] for name in names if name in exact}, settings.device)
    return {"sizes": sizes, "left_out": LEFT_OUT, "trainings": _figures(trainings)}


def _train(
    model: PreTrainedModel,
    data: SizedBatches,
    callbacks: Sequence[TrainerCallback],
    overrides: dict[str, Any],
    in_turn: StepInTurn,
    settings: Settings,
) -> Training:
    """Train with the Trainer, one step for each batch of `data`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=len(data),
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            logging_strategy="no",
            save_strategy="no",
            seed=settings.seed,
            use_cpu=settings.device == "cpu",
            dataloader_pin_memory=settings.device != "cpu",
            report_to="none",
            disable_tqdm=True,
            **overrides,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=lambda batches: batches[0],
            callbacks=[*callbacks, in_turn],
        )
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    history = next((callback.history for callback in callbacks if isinstance(callback, AdaccCallback)), [])
    policies = [event["step"] for event in history if event["event"] == "policy"]
    return Training(
        steps_ms=[seconds * 1e3 for seconds in in_turn.seconds[LEFT_OUT:]],
        loss=loss,
        policy_step=policies[0] if policies else None,
        num_policies=len(policies),
    )


def check_trainings(trainings: Mapping[str, Training], device: str) -> None:
    """Raise WrongResultError on a CPU unless all of these trainings have exactly the same mean loss."""
    differing = [name for name, training in trainings.items() if training.loss != trainings[PLAIN].loss]
    if differing and device == "cpu":
        raise WrongResultError(
            f"{differing[0]}: the mean loss of the Trainer's steps is {trainings[differing[0]].loss}, but must equal "
            f"plain training's {trainings[PLAIN].loss} bit for bit"
        )


def _figures(trainings: Mapping[str, Training]) -> dict[str, dict[str, Any]]:
    """Return each method's step times, and its mean divided by the means of plain training and of checkpointing."""
    figures: dict[str, dict[str, Any]] = {}
    for name, own in trainings.items():
        figures[name] = {
            "steps_ms": own.steps_ms,
            "step_ms": Spread.of(own.steps_ms),
            "mean_ms": statistics.mean(own.steps_ms),
            "loss": own.loss,
            "policy_step": own.policy_step,
            "num_policies": own.num_policies,
        }
        for base, label in ((PLAIN, "plain"), (CHECKPOINTING, "checkpointing")):
            by_step = [ms / other for ms, other in zip(own.steps_ms, trainings[base].steps_ms, strict=True)]
            figures[name][f"mean_of_{label}"] = statistics.mean(own.steps_ms) / statistics.mean(
                trainings[base].steps_ms
            )
            figures[name][f"of_{label}_by_step"] = Spread.of(by_step)
    return figures


Result = TypeVar("Result")


class Turns:
    """Turn-taking of `num_members` threads. Every member has to call `leave` at its end."""

    def __init__(self, num_members: int) -> None:
        self._order = deque(range(num_members))
        self._condition = Condition()

    def wait(self, member: int) -> None:
        """Block until it is the turn of `member`."""
        with self._condition:
            self._condition.wait_for(lambda: self._order[0] == member)

    def pass_on(self, member: int) -> None:
        """Pass the turn to the next member, and block until it comes back."""
        with self._condition:
            self._order.rotate(-1)
            self._condition.notify_all()
        self.wait(member)

    def leave(self, member: int) -> None:
        """Pass the turn to the next member, and take no further turns."""
        with self._condition:
            self._order.remove(member)
            self._condition.notify_all()


class StepInTurn(TrainerCallback):
    """Callback that passes the turn on before each step of a Trainer, and measures the steps' seconds without waiting
    times."""

    def __init__(self, turns: Turns, member: int, clock: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        """Seconds of each step, with all work of the Trainer and its callbacks since the previous step."""
        self._turns, self._member, self._clock = turns, member, clock
        self._since = self._spent = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = self._clock()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._spent += self._clock() - self._since
        self._turns.pass_on(self._member)
        self._since = self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._clock()
        self.seconds.append(self._spent + now - self._since)
        self._since, self._spent = now, 0.0


def run_in_turn(runs: Sequence[Callable[[Turns, int], Result]], threads: int) -> list[Result]:
    """Call each of `runs` in its own thread, with the shared `Turns` and the run's index. Return the results.

    Each thread gets `threads` threads of torch.

    If a run fails, the others continue to their end. Then the run's exception is raised.
    """
    turns = Turns(len(runs))

    def run(member: int) -> Result:
        torch.set_num_threads(threads)  # OpenMP keeps this number per thread
        turns.wait(member)
        try:
            return runs[member](turns, member)
        finally:
            turns.leave(member)

    with ThreadPoolExecutor(max_workers=len(runs)) as pool:
        return list(pool.map(run, range(len(runs))))
