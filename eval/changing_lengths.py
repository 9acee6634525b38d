"""Step times of training methods on batches of changing sizes. The methods take turns, as do copies at one fixed
size."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf import InfeasibleBudgetError, Policy, Profile, profile_model, solve_policy
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.contenders import (
    CHECKPOINTING,
    GATE_STEPS,
    PLAIN,
    Contender,
    check_gradients,
    step_ms,
)
from adacc_hf.eval.trials.length_cases import MODES, LengthCase, Scale, Size, middle
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.reports.run_record import Settings, Spread
from adacc_hf.tape.tape_cache import profiled_tapes

PART, PAUSE = 9, 3
"""Numbers of new sizes: in the turn of one method, and between two trainings at the turn's first size. After the third,
sixth and ninth new size, this first size is trained again. The machine's speed is then still the same, and other sizes
come in between, as with a size that recurs by chance."""

FIXED_STEPS = 4
"""Number of steps of the fixed-size copies in every turn of PART new sizes."""

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Visit:
    """A training step at a size, either the first one at this size or a later one."""

    place: int
    """Index into the new sizes."""
    is_first: bool


def visits(num_sizes: int) -> Iterator[Visit]:
    """Yield the steps of a run: all sizes in order, with revisits of the first size of every PART in between."""
    for place in range(num_sizes):
        yield Visit(place, is_first=True)
        within = place % PART + 1
        if within % PAUSE == 0:
            yield Visit(place + 1 - within, is_first=False)


class Trainee(Contender):
    """Contender that trains: its batches change, and its weights are updated."""

    def __init__(self, name: str, model: PreTrainedModel, batch: Batch, policy: Policy | None = None) -> None:
        super().__init__(name, model, batch, policy)
        if policy is not None:  # a copy's handle starts without the tapes that profiling recorded
            self.handle.tape_cache.take(profiled_tapes(model))
        self.losses: list[float] = []
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._loss = torch.empty(())

    def step(self) -> None:
        """Run one forward and backward. Keep the loss, and leave the gradients on the parameters."""
        loss = self.model(**self.batch).loss
        loss.backward()
        self._loss = loss.detach()

    def train(self, batch: Batch, seed: int, clock: str) -> float:
        """Train one step, and return the milliseconds of its forward and backward. The optimizer's step is not
        timed."""
        self.batch = batch
        torch.manual_seed(seed)
        ms = step_ms(self, clock)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.losses.append(self._loss.item())
        return ms


@dataclass(slots=True)
class Times:
    """Milliseconds of one method's steps."""

    first: list[float] = field(default_factory=list)
    """Times of the first step at each new size."""
    later: dict[int, list[float]] = field(default_factory=dict)
    """Times of later steps, by the index of their size."""
    fixed: list[float] = field(default_factory=list)
    """Times of steps at the fixed size, FIXED_STEPS in each turn."""

    def first_of_later(self) -> list[float]:
        """Return the time of the first step divided by the median time of later steps, for each size with later
        steps."""
        return [self.first[place] / statistics.median(ms) for place, ms in self.later.items()]

    def of(self, other: Times) -> Times:
        """Return the ratios of the times in this object to the times of `other`, on the same batches."""
        return Times(
            first=_ratios(self.first, other.first),
            later={place: _ratios(ms, other.later[place]) for place, ms in self.later.items()},
            fixed=_ratios(self.fixed, other.fixed),
        )


def measure_case(
    case: LengthCase, scale: Scale, budgets: Sequence[float], clock: str, settings: Settings
) -> dict[str, Any]:
    """Measure every method of one case.

    Raise WrongResultError on wrong gradients at the fixed size, and if a method whose gradients must be bit-equal did
    not train to the losses of plain training.
    """
    sizes = case.draw(scale, settings.seed)
    fixed = middle(sizes)
    example = case.make_batch(scale, fixed, settings.device, settings.seed)
    model = case.model(scale, settings.device, settings.seed)
    profile = profile_model(model, example)
    policies, skipped = policies_of(profile, budgets)
    reasons = Counter(
        f"{kind.block_class}: {kind.untrusted}" for kind in map(profile.kind_of, profile.blocks) if kind.untrusted
    )
    changing_size_trainees = [Trainee(name, model, example, policy) for name, policy in policies.items()]
    fixed_size_trainees = [Trainee(name, model, example, policy) for name, policy in policies.items()]
    errors = check_gradients(changing_size_trainees)
    check_gradients(fixed_size_trainees)
    stored_bytes = {trainee.name: trainee.memory().stored_bytes for trainee in fixed_size_trainees}

    def batch_of(size: Size, seed: int) -> Batch:
        return case.make_batch(scale, size, settings.device, seed)

    times = train_in_turn(changing_size_trainees, fixed_size_trainees, sizes, fixed, batch_of, clock)
    drifts = check_losses(changing_size_trainees)
    check_losses(fixed_size_trainees)
    figures = figures_of(times)
    for trainee in changing_size_trainees:
        name = trainee.name
        figures[name] |= {
            "stored_of_plain": stored_bytes[name] / stored_bytes[PLAIN],
            "gradient_error": errors[name],
            "loss_drift": drifts[name],
        }
        if trainee.policy is not None:
            figures[name]["actions"] = dict(trainee.policy.action_counts())
            figures[name]["fallbacks"] = dict(reasons)
    return {"sizes": sizes, "fixed_size": fixed, "left_out": GATE_STEPS, "methods": figures, "skipped": skipped}


def policies_of(profile: Profile, budgets: Sequence[float]) -> tuple[dict[str, Policy | None], dict[str, str]]:
    """Return the methods by name, with their policy if they have one, and the reasons why budgets are infeasible."""
    policies: dict[str, Policy | None] = {PLAIN: None, CHECKPOINTING: None}
    skipped = {}
    for budget in budgets:
        for mode, config in MODES.items():
            name = f"{mode}, {budget:.0%} of plain"
            try:
                policies[name] = solve_policy(profile, budget, config)
            except InfeasibleBudgetError as error:
                skipped[name] = str(error)
    return policies, skipped


def train_in_turn(
    changing: Sequence[Trainee],
    still: Sequence[Trainee],
    sizes: Sequence[Size],
    fixed: Size,
    batch_of: Callable[[Size, int], Batch],
    clock: str,
) -> dict[str, Times]:
    """Return the times of all methods, on the same batches.

    All methods train a turn of PART new sizes before the next turn begins, so that a busy machine slows all of them
    alike. The order of the methods rotates. When a method's turn begins, the caches are full of other methods' data, so
    its first step, at the fixed size, is not timed. After that, the method runs as in a separate training.
    """
    times = {trainee.name: Times() for trainee in changing}
    orders = deque(changing), deque(still)
    turns = [list(turn) for _, turn in groupby(visits(len(sizes)), key=lambda visit: visit.place // PART)]
    seed = 0
    for turn in tqdm(turns, desc="training", unit="turn", leave=False):
        for trainee in orders[0]:
            own_times = times[trainee.name]
            trainee.train(batch_of(fixed, seed), seed, clock)
            for own_seed, visit in enumerate(turn, seed + 1):
                ms = trainee.train(batch_of(sizes[visit.place], own_seed), own_seed, clock)
                (own_times.first if visit.is_first else own_times.later.setdefault(visit.place, [])).append(ms)
        for trainee in orders[1]:
            _, *timed = (
                trainee.train(batch_of(fixed, seed + step), seed + step, clock) for step in range(1 + FIXED_STEPS)
            )
            times[trainee.name].fixed.extend(timed)
        seed += 1 + len(turn)
        for order in orders:
            order.rotate(1)
    return times


def check_losses(trainees: Sequence[Trainee]) -> dict[str, float]:
    """Return each method's largest relative difference of losses from the first method's losses, over all steps.

    On a CPU, raise WrongResultError if the losses of a bit-equal method differ. A GPU adds floats in no fixed order,
    and training amplifies the smallest difference, so losses are not checked there.
    """
    expected, drifts = trainees[0].losses, {}
    for trainee in trainees:
        pairs = zip(trainee.losses, expected, strict=True)
        drift = max(abs(loss / other - 1.0) for loss, other in pairs)
        if drift and trainee.is_lossless and not trainee.other_sums and trainee.device.type == "cpu":
            raise WrongResultError(
                f"{trainee.name}: the losses of {len(expected)} steps differ from the losses of {trainees[0].name}, "
                f"by a factor of up to 1 + {drift:.3g}, but must be equal bit for bit"
            )
        drifts[trainee.name] = drift
    return drifts


def figures_of(times: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """Return each method's step time at new sizes, and its ratios to other methods and to its own other steps.

    Each ratio is a ratio of medians. The figures also contain the spread of the ratios of single steps, in which both
    methods had the same batch and machine. Steps at new sizes and at the fixed size, or first and later steps at one
    size, have different batches. For these, "beside_plain" divides a method's ratio by the same ratio of plain
    training.
    """
    figures: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        ratios_to_plain = own.of(times[PLAIN])
        spread, fixed = Spread.of(own.first), Spread.of(own.fixed)
        figures[name] = {
            "steps_ms": own.first,
            "step_ms": spread,
            "fixed_step_ms": fixed,
            "of_fixed": spread.median / fixed.median,
            "of_fixed_beside_plain": statistics.median(ratios_to_plain.first)
            / statistics.median(ratios_to_plain.fixed),
            "of_fixed_beside_plain_by_turn": Spread.of(
                _ratios(_by_turn(ratios_to_plain.first, PART), _by_turn(ratios_to_plain.fixed, FIXED_STEPS))
            ),
            "first_of_later": Spread.of(own.first_of_later()),
            "first_of_later_beside_plain": Spread.of(ratios_to_plain.first_of_later()),
            "mean_of_plain": statistics.mean(own.first) / statistics.mean(times[PLAIN].first),
        }
        for base, label in ((PLAIN, "plain"), (CHECKPOINTING, "checkpointing")):
            figures[name][f"of_{label}"] = spread.median / statistics.median(times[base].first)
            figures[name][f"of_{label}_by_step"] = Spread.of(own.of(times[base]).first)
    return figures


def _by_turn(ratios: Sequence[float], size: int) -> list[float]:
    """Return the median of each turn of `size` ratios. The last turn may have fewer ratios."""
    return [statistics.median(ratios[start : start + size]) for start in range(0, len(ratios), size)]


def _ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    return [ms / base for ms, base in zip(own, other, strict=True)]
