"""The same by the Trainer: whole trainings on batches of ever new sizes, with the callback that users add."""

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
from adacc_hf.eval.records.clock import CLOCKS
from adacc_hf.eval.records.records import RedGateError
from adacc_hf.eval.trials.contenders import CHECKPOINTING, PLAIN
from adacc_hf.eval.trials.length_cases import MODES, LengthCase, Scale, Size
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.price.timing import wait_for
from adacc_hf.reports.run_record import Settings, Spread

TRAINER = "trainer"
"""The name of this case on the command line, and of its model."""
TRAINER_MODEL = "llama_padded"

TRAINER_SCALE = Scale(batch=4, shortest=60, longest=400, steps=40)

LEFT_OUT = 4
"""Steps of a training that are not counted: by default the policy is set after two, and the next two are its first."""


class SizedBatches(Dataset[Batch]):
    """A whole batch of each of `sizes`, which `make(size, device, seed)` makes."""

    def __init__(self, make: Callable[[Size, str, int], Batch], sizes: Sequence[Size], seed: int) -> None:
        self.make, self.sizes, self.seed = make, sizes, seed

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Batch:
        return self.make(self.sizes[index], "cpu", self.seed + index)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one training by the Trainer left."""

    steps_ms: list[float]
    """Of every step but those that are left out, with all that the Trainer and its callbacks do around it."""
    loss: float
    """The mean of all steps."""
    policy_step: int | None
    """The step after which the first policy was there; None without the callback."""
    num_policies: int


def measure_trainings(
    case: LengthCase, scale: Scale, budgets: Sequence[float], clock: str, settings: Settings
) -> dict[str, Any]:
    """The figures of every method. Raises RedGateError if what is to be bit-equal has another loss than plain."""
    if scale.steps <= LEFT_OUT:
        raise ValueError(f"steps={scale.steps} must be more than the {LEFT_OUT} that are not counted")
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
        wait_for(torch.device(settings.device))  # or a step would end in the next one's turn
        return CLOCKS[clock]()

    def run(name: str, turns: Turns, member: int) -> Training:
        callbacks, overrides = methods.get(name) or ([AdaccCallback(configs[name])], {})
        model = case.model(scale, settings.device, settings.seed)
        in_turn = StepInTurn(turns, member, now)
        return _train(model, data, callbacks, overrides, in_turn, settings)

    found = dict(zip(names, run_in_turn([partial(run, name) for name in names], settings.threads), strict=True))
    check_trainings({name: found[name] for name in names if name in exact}, settings.device)
    return {"sizes": sizes, "left_out": LEFT_OUT, "trainings": _figures(found)}


def _train(
    model: PreTrainedModel,
    data: SizedBatches,
    callbacks: Sequence[TrainerCallback],
    overrides: dict[str, Any],
    in_turn: StepInTurn,
    settings: Settings,
) -> Training:
    """One training by the Trainer, a step for each batch of `data`."""
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


def check_trainings(found: Mapping[str, Training], device: str) -> None:
    """Raise RedGateError, on a CPU, unless all of these trainings ended with the very same mean loss."""
    differing = [name for name, training in found.items() if training.loss != found[PLAIN].loss]
    if differing and device == "cpu":
        raise RedGateError(
            f"{differing[0]}: the mean loss of the Trainer's steps is {found[differing[0]].loss}, that of plain "
            f"training {found[PLAIN].loss}"
        )


def _figures(found: Mapping[str, Training]) -> dict[str, dict[str, Any]]:
    """Per method its step time, and what its mean is of plain's and of checkpointing's."""
    figures: dict[str, dict[str, Any]] = {}
    for name, own in found.items():
        figures[name] = {
            "steps_ms": own.steps_ms,
            "step_ms": Spread.of(own.steps_ms),
            "mean_ms": statistics.mean(own.steps_ms),
            "loss": own.loss,
            "policy_step": own.policy_step,
            "num_policies": own.num_policies,
        }
        for base, label in ((PLAIN, "plain"), (CHECKPOINTING, "checkpointing")):
            by_step = [ms / other for ms, other in zip(own.steps_ms, found[base].steps_ms, strict=True)]
            figures[name][f"mean_of_{label}"] = statistics.mean(own.steps_ms) / statistics.mean(found[base].steps_ms)
            figures[name][f"of_{label}_by_step"] = Spread.of(by_step)
    return figures


Result = TypeVar("Result")


class Turns:
    """Whose turn it is, of as many as were announced. Each has to leave in the end."""

    def __init__(self, num_members: int) -> None:
        self._order = deque(range(num_members))
        self._condition = Condition()

    def wait(self, member: int) -> None:
        """Come back when it is the turn of `member`."""
        with self._condition:
            self._condition.wait_for(lambda: self._order[0] == member)

    def pass_on(self, member: int) -> None:
        """Give the turn to the next one, and come back when it has gone round."""
        with self._condition:
            self._order.rotate(-1)
            self._condition.notify_all()
        self.wait(member)

    def leave(self, member: int) -> None:
        """Give the turn to the next one for good."""
        with self._condition:
            self._order.remove(member)
            self._condition.notify_all()


class StepInTurn(TrainerCallback):
    """Passes the turn on before each step of a Trainer; the seconds of the steps by a clock, without the waiting."""

    def __init__(self, turns: Turns, member: int, clock: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        """Of every step with all that the Trainer and its callbacks have done since the one before."""
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
    """What each of `runs` returns, given the turns and its place in them; `threads` is torch's number in each.

    One that fails lets the others go on to their end; then its exception is raised.
    """
    turns = Turns(len(runs))

    def run(member: int) -> Result:
        torch.set_num_threads(threads)  # which OpenMP counts for each thread by itself
        turns.wait(member)
        try:
            return runs[member](turns, member)
        finally:
            turns.leave(member)

    with ThreadPoolExecutor(max_workers=len(runs)) as pool:
        return list(pool.map(run, range(len(runs))))
