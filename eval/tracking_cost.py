"""What following the data costs over a long run: tracking, solving, taking over and counting memory.

    adacc eval tracking-cost --clock cpu

A GPT-2 is trained by the Trainer on the standard library's text. Two figures stand beside each other: what the callback
itself logs as `adacc/tracking_ms`, against the time of the same steps; and, by the clock of this bench, by how much the
steps that anything happened in are longer than the normal ones around them.

A third one is no part of them: calls are recorded again now and then, whether anything is tracked or not, to find
operators that vary. The first two steps do both; a short run without tracking tells how much of them is recording.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments

from adacc_hf import AdaccCallback, AdaccConfig
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.clock import CLOCKS, add_clock, check_clock
from adacc_hf.eval.trials.training import ByteSequences
from adacc_hf.eval.trials.workload import Workload, library_bytes
from adacc_hf.run.follow_plan import is_checked_call

WORKLOAD = Workload(width=128, layers=4, batch=1, tokens=64)
"""The model of all runs; only the batch differs."""

ASKED_SHARE = 0.01
"""What tracking and solving may take of a run."""

AROUND = 8
"""Normal steps on either side that a step is compared with: close by, since a machine's speed drifts."""

FOLLOW_UPS = 2
"""Steps after one that tracked or changed the policy whose time counts too: the solver runs, new plans are prepared."""

FIRST_CALLS = 2
"""Steps under a first policy whose calls are recorded."""


def main(argv: Sequence[str] | None = None, workload: Workload = WORKLOAD) -> int:
    """Train with every batch size, print the table, save record and table."""
    parser = argparse.ArgumentParser(prog="adacc eval tracking-cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive_int, default=2000, help="optimizer steps of every run")
    parser.add_argument("--batches", type=positive_int, nargs="+", default=[4], help="batch sizes")
    parser.add_argument("--budget", type=float, default=0.2, help="memory budget, a fraction of what plain stores")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "tracking_cost")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    if arguments.steps < 4 * AROUND:
        raise ValueError(
            f"--steps={arguments.steps} must be {4 * AROUND} or more: normal steps are to be compared with"
        )
    options = {name: getattr(arguments, name) for name in ("steps", "batches", "budget", "clock")}
    with open_ledger(settings, {"workload": asdict(workload), **options}, arguments.resume) as ledger:
        for batch in tqdm(arguments.batches, desc="tracking-cost", unit="run"):
            ledger.measure(f"batch {batch}", partial(_run, ledger, batch))
        ledger.finish(asked_share=ASKED_SHARE)
        ledger.publish(report_text(ledger))
    return 0


def report_text(ledger: Ledger) -> str:
    """One line per run as Markdown."""
    info = ledger.run_info
    heading = f"{Workload(**info['workload'])}, budget {info['budget']:.0%} of what plain training stores"
    table = markdown_table([_cells(name, point) for name, point in ledger.points.items()])
    return f"{heading}\n\n{table}\n\nAsked for: below {ledger.summary['asked_share']:.0%} over 2,000 steps.\n"


def _cells(name: str, point: Figures) -> dict[str, str]:
    return {
        "run": name,
        "steps": str(point["steps"]),
        "normal step, ms": f"{point['normal_step_ms']:.1f}",
        "tracked": str(point["events"].get("tracking", 0)),
        "changes": str(point["events"].get("change", 0)),
        "memory counted": str(point["events"].get("memory", 0)),
        "as logged": f"{point['logged_share']:.2%}",
        "by the clock": f"{point['measured_share']:.2%}",
        "recording, by the clock": f"{point['recorded_ms'] / point['total_ms']:.2%}",
    }


class StepClock(TrainerCallback):
    """The milliseconds of every step by two clocks: the bench's own, and the wall's, which the callback reads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clocks = (clock, time.perf_counter)
        self.times: list[tuple[float, ...]] = []
        self._last: tuple[float, ...] = ()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = self._last or self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._now()
        self.times.append(tuple((n - last) * 1e3 for n, last in zip(now, self._last, strict=True)))
        self._last = now

    def _now(self) -> tuple[float, ...]:
        return tuple(clock() for clock in self.clocks)


class Trained(NamedTuple):
    """What a run left."""

    history: list[dict[str, Any]]
    metrics: dict[str, float]


def _run(ledger: Ledger, batch: int) -> Figures:
    """Train without tracking until normal steps are known, then train with it; what that came to."""
    info = ledger.run_info
    steps = StepClock(CLOCKS[info["clock"]])
    untracked = _train(ledger, batch, steps, AdaccConfig().profile_steps + FIRST_CALLS + 2 * AROUND, "off")
    by_clock = [ms for ms, _ in steps.times[untracked.history[0]["step"] :]]
    recorded_ms = sum(by_clock[:FIRST_CALLS]) - FIRST_CALLS * statistics.median(by_clock[FIRST_CALLS:])
    steps = StepClock(CLOCKS[info["clock"]])
    adacc = _train(ledger, batch, steps, info["steps"], "exponential")
    return figures(adacc.history, steps.times, adacc.metrics["adacc/tracking_ms"], recorded_ms)


def _train(ledger: Ledger, batch: int, steps: StepClock, num_steps: int, tracking: str) -> Trained:
    """A run of `num_steps`, whose times `steps` takes."""
    info, settings = ledger.run_info, ledger.settings
    workload = Workload(**info["workload"] | {"batch": batch})
    torch.manual_seed(settings.seed)
    adacc = AdaccCallback(memory_budget=info["budget"], min_compress_bytes=4096, tracking=tracking)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=batch,
            learning_rate=3e-4,
            logging_steps=max(1, num_steps // 20),
            save_strategy="no",
            seed=settings.seed,
            use_cpu=settings.device == "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=workload.model(settings.device, settings.seed),
            args=arguments,
            train_dataset=ByteSequences(library_bytes(), workload.tokens, num_steps * batch, settings.seed),
            callbacks=[adacc, steps],
        )
        trainer.train()
    (summary,) = [log for log in trainer.state.log_history if "train_loss" in log]
    return Trained(adacc.history, summary)


def figures(
    history: Sequence[dict[str, Any]], times: Sequence[tuple[float, ...]], logged_ms: float, first_ms: float
) -> Figures:
    """The shares of a run whose first policy is the first event; `times` are those of all its steps, by both clocks.

    `first_ms` is how much longer the first two steps take because they are recorded.
    """
    first, *events = history
    start = first["step"]
    by_clock = [ms for ms, _ in times[start:]]
    numbers = range(1, len(by_clock) + 1)
    followed = {event["step"] + later - start for event in events for later in range(FOLLOW_UPS + 1)}
    touched = (followed | {*range(1, FIRST_CALLS + 1)}) & {*numbers}
    recorded = {number for number in numbers if is_checked_call(number)} - touched
    normal = {number: by_clock[number - 1] for number in numbers if number not in touched | recorded}

    def slower_ms(number: int) -> float:
        return by_clock[number - 1] - _around(normal, number)

    extra_ms = sum(map(slower_ms, touched)) - first_ms
    return {
        "steps": len(by_clock),
        "events": dict(Counter(event["event"] for event in events)),
        "normal_step_ms": statistics.median(normal.values()),
        "total_ms": sum(by_clock),
        "extra_ms": extra_ms,
        "measured_share": extra_ms / sum(by_clock),
        "recorded_ms": first_ms + sum(map(slower_ms, recorded)),
        "logged_ms": logged_ms,
        "logged_share": logged_ms / sum(wall for _, wall in times[start:]),
    }


def _around(normal: dict[int, float], number: int) -> float:
    """The median of the normal steps nearest to step `number`."""
    nearest = sorted(normal, key=lambda other: abs(other - number))[: 2 * AROUND]
    return statistics.median(normal[other] for other in nearest)


if __name__ == "__main__":
    sys.exit(main())
