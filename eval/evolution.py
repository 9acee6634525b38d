"""What policy evolution gains: the frozen first policy against one that follows the data (the paper's Figure 7).

    adacc eval evolution

Two cases. A GPT-2 is trained from scratch on the standard library's text at four batch sizes; both runs begin with the
same profile. In the constructed case every block's ln_2 has outlier channels when the policy is set, which vanish, come
back in larger numbers, and vanish again. After training, the steps of both final policies are timed in turn on the same
model, so that a busy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, Policy, Profile, Rectifier, apply_policy, profile_model, solve_policy
from adacc_hf.eval.clock import CLOCKS, add_clock, check_clock
from adacc_hf.eval.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records import Settings, Spread, add_settings, markdown_table, positive_int
from adacc_hf.eval.workload import Batch, Workload
from adacc_hf.executor import PolicyHandle
from adacc_hf.memory import measure_step
from adacc_hf.tracking import is_tracking_step
from adacc_hf.units import format_bytes

BATCHES = (2, 4, 8, 16)
WIDTH = Workload(width=128, layers=4, batch=1, tokens=128)
"""The model of all cases; only the batch differs."""
PAPER = "1.13x to 1.18x on GPT-117M, 1.11x to 1.20x on GPT-345M"

PLANTED = ((0, 6), (0.05, 0), (0.35, 12), (0.6, 0))
"""The constructed case: from this share of the run on, so many channels of ln_2 are outliers."""
PLANTED_BIAS = 20.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of policy, predicted and measured."""

    step: int
    reason: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_step_ms: float
    measured_step_ms: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case came to."""

    frozen_step_ms: Spread
    evolving_step_ms: Spread
    gain: float
    """Frozen over evolving step time: the paper's throughput ratio."""
    frozen_stored_bytes: int
    evolving_stored_bytes: int
    loss: float
    num_changes: int
    tracking_share: float
    """Time of tracking and of waiting for the solver over that of the run."""
    changes: list[Change]
    outliers: list[tuple[int, int]]
    """(step, outlier channels of all tracked activations)."""


def main(argv: Sequence[str] | None = None, workload: Workload = WIDTH) -> int:
    """Measure every case, print the table and save the record."""
    parser = argparse.ArgumentParser(prog="adacc eval evolution", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive_int, default=256, help="training steps of every case")
    parser.add_argument("--rounds", type=positive_int, default=11, help="timed rounds of the final policies")
    parser.add_argument("--batches", type=positive_int, nargs="+", default=list(BATCHES), help="batch sizes")
    parser.add_argument("--budget", type=float, default=0.35, help="memory budget, a fraction of what plain stores")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "evolution")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    options = {name: getattr(arguments, name) for name in ("steps", "rounds", "batches", "budget", "clock")}
    with open_ledger(settings, {"workload": asdict(workload), **options}, arguments.resume) as ledger:
        for batch in tqdm(arguments.batches, desc="evolution", unit="batch size"):
            for title, planted in (("stdlib text", ()), ("constructed", PLANTED)):
                case = Case(replace(workload, batch=batch), planted, arguments, settings)
                ledger.measure(f"{title}, batch {batch}", lambda case=case: asdict(case.run()))
        ledger.finish(paper=PAPER)
        ledger.publish(report_text(ledger))
    return 0


def report_text(ledger: Ledger) -> str:
    """One line per case as Markdown, and the paper's figures."""
    info = ledger.run_info
    workload = Workload(**info["workload"])
    heading = f"{workload}, {info['steps']} steps, budget {info['budget']:.0%} of what plain training stores"
    table = markdown_table([_cells(name, _outcome(point)) for name, point in ledger.points.items()])
    return f"{heading}\n\n{table}\n\nThe paper's Figure 7: {ledger.summary['paper']}.\n"


def _outcome(point: dict[str, Any]) -> Outcome:
    spreads = {name: Spread(**point[name]) for name in ("frozen_step_ms", "evolving_step_ms")}
    return Outcome(**{**point, **spreads, "changes": [Change(**change) for change in point["changes"]]})


class Case:
    """One training run whose policy evolves, and its frozen twin at the end."""

    def __init__(
        self, workload: Workload, planted: tuple[tuple[float, int], ...], arguments: Any, settings: Settings
    ) -> None:
        torch.manual_seed(settings.seed)
        self.model: PreTrainedModel = workload.model(settings.device, settings.seed)
        self.batches: Iterator[Batch] = workload.batches(settings.device, settings.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        # A chunked head replaces a forward, and a policy that is timed here is installed within another.
        self.config = AdaccConfig(memory_budget=arguments.budget, min_compress_bytes=4096, head="plain")
        self.steps, self.rounds = arguments.steps, arguments.rounds
        self.clock = CLOCKS[arguments.clock]
        self.planted = {int(share * arguments.steps): count for share, count in planted}

    def run(self) -> Outcome:
        self._plant(0)
        for _ in range(2):
            self._step()
        profile = profile_model(self.model, next(self.batches), self.config, self.optimizer)
        first = solve_policy(profile, config=self.config)
        evolution = _Evolving(self, profile, first)
        for step in range(1, self.steps + 1):
            self._plant(step)
            evolution.step(step)
        evolution.handle.remove()
        return self._compare(first, evolution)

    def _step(self) -> tuple[float, float]:
        """(loss, time in ms) of one training step."""
        start = self.clock()
        loss = self.model(**next(self.batches)).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        return value, (self.clock() - start) * 1e3

    def _plant(self, step: int) -> None:
        if step in self.planted:
            for block in self.model.transformer.h:
                block.ln_2.bias.data[:] = 0.0
                block.ln_2.bias.data[: self.planted[step]] = PLANTED_BIAS

    def _compare(self, first: Policy, evolution: _Evolving) -> Outcome:
        times: dict[str, list[float]] = {"frozen": [], "evolving": []}
        policies = {"frozen": first, "evolving": evolution.rectifier.policy}
        for number in range(self.rounds):
            order = list(policies)[:: 1 if number % 2 else -1]
            for name in order:
                times[name].append(self._timed(policies[name]))
        gain = statistics.median(f / e for f, e in zip(times["frozen"], times["evolving"], strict=True))
        return Outcome(
            frozen_step_ms=Spread.of(times["frozen"]),
            evolving_step_ms=Spread.of(times["evolving"]),
            gain=gain,
            frozen_stored_bytes=first.predicted_stored_bytes,
            evolving_stored_bytes=evolution.rectifier.policy.predicted_stored_bytes,
            loss=evolution.loss,
            num_changes=len(evolution.changes),
            tracking_share=evolution.tracking_ms / evolution.total_ms,
            changes=evolution.changes,
            outliers=evolution.outliers,
        )

    def _timed(self, policy: Policy, steps: int = 3) -> float:
        """Median time of a step under `policy`, its recorded calls left out."""
        with apply_policy(self.model, policy):
            for _ in range(2):
                self._step()
            return statistics.median(self._step()[1] for _ in range(steps))


class _Evolving:
    """The loop around the rectifier, as `AdaccCallback` has it: tracks, solves on a thread, takes over a step later."""

    def __init__(self, case: Case, profile: Profile, policy: Policy) -> None:
        self.case = case
        self.handle: PolicyHandle = apply_policy(case.model, policy)
        self.rectifier = Rectifier(profile, policy, case.config)
        self.changes: list[Change] = []
        self.outliers: list[tuple[int, int]] = []
        self.tracking_ms = self.total_ms = self.loss = 0.0
        self._normal_ms: list[float] = []

    def step(self, step: int) -> None:
        started = time.perf_counter()
        tracks = is_tracking_step(step, self.case.config.tracking) and self.rectifier.has_work()
        if tracks:
            self.rectifier.start_tracking(self.handle.plans)
        self.loss, step_ms = self.case._step()
        waits = self.rectifier.is_solving
        needs_solving = tracks and self._finish_tracking(step)
        self.total_ms += (time.perf_counter() - started) * 1e3
        if waits:
            self._take_over(step)
        if needs_solving:
            self.rectifier.start_solving()
        if tracks:
            normal = statistics.median(self._normal_ms) if self._normal_ms else step_ms
            self.tracking_ms += max(0.0, (time.perf_counter() - started) * 1e3 - normal)
        elif not waits:
            self._normal_ms = [*self._normal_ms[-15:], step_ms]

    def _finish_tracking(self, step: int) -> bool:
        found = self.rectifier.finish_tracking()
        self.outliers.append((step, sum(found.num_outliers.values())))
        return found.needs_solving

    def _take_over(self, step: int) -> None:
        before = self.rectifier.policy
        found = self.rectifier.take_over()
        if found.policy is None:
            return
        old_ms = self.case._timed(before, 5)
        self.handle.remove()
        self.handle = apply_policy(self.case.model, found.policy)
        for _ in range(2):
            self.case._step()
        memory = measure_step(self.case.model, next(self.case.batches), self.case.optimizer)
        measured_ms = statistics.median(self.case._step()[1] for _ in range(5))
        extra_ms = found.policy.predicted_overhead_ms - before.predicted_overhead_ms
        self.changes.append(
            Change(
                step=step,
                reason=found.reason,
                predicted_peak_bytes=found.policy.predicted_peak_bytes,
                measured_peak_bytes=memory.peak_bytes,
                predicted_step_ms=old_ms + extra_ms,
                measured_step_ms=measured_ms,
            )
        )


def _cells(name: str, outcome: Outcome) -> dict[str, str]:
    peaks = [abs(c.measured_peak_bytes / c.predicted_peak_bytes - 1) for c in outcome.changes]
    times = [abs(c.measured_step_ms / c.predicted_step_ms - 1) for c in outcome.changes]
    counts = [count for _, count in outcome.outliers]
    return {
        "case": name,
        "frozen, ms": outcome.frozen_step_ms.text(1),
        "evolving, ms": outcome.evolving_step_ms.text(1),
        "gain": f"{outcome.gain:.3f}x",
        "stored": f"{format_bytes(outcome.frozen_stored_bytes)} -> {format_bytes(outcome.evolving_stored_bytes)}",
        "changes": str(outcome.num_changes),
        "outliers": f"{min(counts)} to {max(counts)}" if counts else "-",
        "peak off by": f"{max(peaks):.1%}" if peaks else "-",
        "step off by": f"{statistics.median(times):.1%}" if times else "-",
        "tracking": f"{outcome.tracking_share:.2%}",
    }


if __name__ == "__main__":
    sys.exit(main())
