"""One training run whose policy follows the data, and the steps of its first and last policy timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from adacc_hf import AdaccConfig, Rectifier, apply_policy, profile_model, solve_policy
from adacc_hf.adapt.evolution import is_tracking_step
from adacc_hf.adapt.judging import Rectification
from adacc_hf.eval.records.records import Spread
from adacc_hf.eval.trials.evolution_scenarios import Scenario, plant
from adacc_hf.eval.trials.workload import Batch, Workload
from adacc_hf.run.executor import BlockPlans, PolicyHandle
from adacc_hf.torch_glue.memory import measure_step

CHANGE_ROUNDS = 11
"""Rounds in which the policies before and after a change are timed at a time, as often as it takes to know the median
difference to within STEP_NOISE."""

MOST_ROUNDS = 44
"""Rounds after which a change counts as measured on a machine too noisy for STEP_NOISE."""

STEP_NOISE = 0.01
"""Standard error of a change's measured step time, as a part of it: a fifth of what predictions may be off by. Of 11
rounds it is 1 to 4 percent on two shared cores."""

GAIN_NOISE = 0.005
"""Standard error of the gain: gains are of one or two percent."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of policy, predicted and measured."""

    step: int
    reason: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_step_ms: float
    """Measured under the policy before, and the change in predicted overhead."""
    measured_step_ms: float
    """Measured under the policy before, and the median difference of steps taken in turn."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case came to."""

    frozen_step_ms: Spread
    evolving_step_ms: Spread
    gain: float
    """Frozen over evolving step time, the median of all rounds: the paper's throughput ratio."""
    frozen_overhead_ms: float
    """Predicted with the prices of the first profile."""
    evolving_overhead_ms: float
    """Predicted with the prices of the last tracking step that led to a change."""
    frozen_stored_bytes: int
    evolving_stored_bytes: int
    loss: float
    changes: list[Change]
    outliers: list[tuple[int, int]]
    """(step, outlier channels of all tracked activations)."""


class Case:
    """A model in training, and the settings of its policies."""

    def __init__(
        self,
        workload: Workload,
        scenario: Scenario,
        steps: int,
        clock: Callable[[], float],
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model: PreTrainedModel = scenario.model(workload, device, seed)
        self.batches: Iterator[Batch] = workload.batches(device, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.config = AdaccConfig(
            memory_budget=scenario.budget, zscore_threshold=scenario.zscore_threshold, min_compress_bytes=4096
        )
        self.steps = steps
        self.clock = clock
        self._planted = scenario.planted_from(steps)

    def run(self, rounds: int) -> Outcome:
        """Train, then time `rounds` steps under the first and under the last policy."""
        self._plant(0)
        for _ in range(2):
            self.step()
        profile = profile_model(self.model, next(self.batches), self.config, self.optimizer)
        first = solve_policy(profile, config=self.config)
        with apply_policy(self.model, first) as handle:
            evolving = Evolving(self, handle, Rectifier(profile, first, self.config))
            for step in range(1, self.steps + 1):
                self._plant(step)
                evolving.step(step)
            plans = {"frozen": handle.prepare(first, handle.plans), "evolving": handle.plans}
            times = self._timed_until_known(handle, plans, rounds)
        last = evolving.rectifier.policy
        return Outcome(
            frozen_step_ms=Spread.of(times["frozen"]),
            evolving_step_ms=Spread.of(times["evolving"]),
            gain=statistics.median(_ratios(times)),
            frozen_overhead_ms=first.predicted_overhead_ms,
            evolving_overhead_ms=last.predicted_overhead_ms,
            frozen_stored_bytes=first.predicted_stored_bytes,
            evolving_stored_bytes=last.predicted_stored_bytes,
            loss=evolving.loss,
            changes=evolving.changes,
            outliers=evolving.outliers,
        )

    def step(self) -> float:
        """The loss of one training step."""
        loss = self.model(**next(self.batches)).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _plant(self, step: int) -> None:
        if step in self._planted:
            plant(self.model, self._planted[step])

    def _timed_until_known(
        self, handle: PolicyHandle, plans: Mapping[str, BlockPlans], rounds: int
    ) -> dict[str, list[float]]:
        """`timed` as often as it takes to know the gain to within GAIN_NOISE."""
        times = self.timed(handle, plans, rounds)
        while median_error(_ratios(times)) > GAIN_NOISE and len(times["frozen"]) < MOST_ROUNDS:
            for name, more in self.timed(handle, plans, rounds).items():
                times[name] += more
        return times

    def timed(self, handle: PolicyHandle, plans: Mapping[str, BlockPlans], rounds: int) -> dict[str, list[float]]:
        """Milliseconds of training steps under each of `plans`, taken in turn so that a busy machine disturbs all."""
        times: dict[str, list[float]] = {name: [] for name in plans}
        for number in range(rounds + 1):
            for name in list(plans)[:: 1 if number % 2 else -1]:
                handle.follow(plans[name])
                start = self.clock()
                self.step()
                times[name].append((self.clock() - start) * 1e3)
        return {name: samples[1:] for name, samples in times.items()}


class Evolving:
    """The loop around the rectifier, as `AdaccCallback` has it: tracks, solves on a thread, takes over a step later.

    When the policy changes, some steps more are trained to measure it.
    """

    def __init__(self, case: Case, handle: PolicyHandle, rectifier: Rectifier) -> None:
        self.case = case
        self.rectifier = rectifier
        self.changes: list[Change] = []
        self.outliers: list[tuple[int, int]] = []
        self.loss = 0.0
        self._handle = handle

    def step(self, step: int) -> None:
        tracks = is_tracking_step(step, self.case.config.tracking) and self.rectifier.has_work()
        waits = self.rectifier.is_solving
        if tracks:
            self.rectifier.start_tracking(self._handle.plans)
        self.loss = self.case.step()
        needs_solving = tracks and self._finish_tracking(step)
        before, found = self._handle.plans, self.rectifier.take_over() if waits else None
        if found is not None and found.policy is not None:
            self._handle.replace(found.policy)
        if needs_solving:
            self.rectifier.start_solving()
        if found is not None and self._handle.plans is not before:
            self._measure(step, before, found)

    def _finish_tracking(self, step: int) -> bool:
        found = self.rectifier.finish_tracking()
        self.outliers.append((step, sum(found.num_outliers.values())))
        return found.needs_solving

    def _measure(self, step: int, before: BlockPlans, found: Rectification) -> None:
        after = self._handle.plans
        before_ms, longer_ms = self._times(before, after)
        self._handle.follow(after)
        # Two, because in the first codecs make their maps of outlier channels.
        peaks = [
            measure_step(self.case.model, next(self.case.batches), self.case.optimizer).peak_bytes for _ in range(2)
        ]
        extra_ms = after.policy.predicted_overhead_ms - before.policy.predicted_overhead_ms
        self.changes.append(
            Change(
                step=step,
                reason=found.reason,
                predicted_peak_bytes=after.policy.predicted_peak_bytes,
                measured_peak_bytes=min(peaks),
                predicted_step_ms=before_ms + extra_ms,
                measured_step_ms=before_ms + longer_ms,
            )
        )

    def _times(self, before: BlockPlans, after: BlockPlans) -> tuple[float, float]:
        """Milliseconds of a step before the change, and how many more it takes after it."""
        old: list[float] = []
        longer: list[float] = []
        while not old or (median_error(longer) > STEP_NOISE * statistics.median(old) and len(old) < MOST_ROUNDS):
            times = self.case.timed(self._handle, {"before": before, "after": after}, CHANGE_ROUNDS)
            old += times["before"]
            longer += [new - was for was, new in zip(times["before"], times["after"], strict=True)]
        return statistics.median(old), statistics.median(longer)


def _ratios(times: Mapping[str, Sequence[float]]) -> list[float]:
    """Frozen over evolving step time of each round."""
    return [frozen / evolving for frozen, evolving in zip(times["frozen"], times["evolving"], strict=True)]


def median_error(samples: Sequence[float]) -> float:
    """The standard error of the median of `samples`, by their median distance from it: some are wild outliers.

    For normal samples that distance is 0.6745 of the standard deviation, and a median varies 1.2533 times as much as
    a mean.
    """
    middle = statistics.median(samples)
    deviation = statistics.median(abs(sample - middle) for sample in samples) / 0.6745
    return 1.2533 * deviation / len(samples) ** 0.5
