"""Methods that train on batches of ever new sizes, timed in turn, each beside a copy of itself at one fixed size."""

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
from adacc_hf.eval.records.records import RedGateError
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
from adacc_hf.tape.tape_cache import library_of_profiles

PART, PAUSE = 9, 3
"""The first of every nine new sizes comes again after the third, the sixth and the ninth of them: close enough for the
machine to be the same, and with others in between, as a size that came by chance would have."""

FIXED_STEPS = 4
"""Steps of the copies at the fixed size in every turn of PART new sizes."""

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Visit:
    """A step at a size: the first one there, or a later one."""

    place: int
    """In the order of the new sizes."""
    is_first: bool


def visits(num_sizes: int) -> Iterator[Visit]:
    """The steps of a run: all sizes in their order, and the first of every PART again in between."""
    for place in range(num_sizes):
        yield Visit(place, is_first=True)
        within = place % PART + 1
        if within % PAUSE == 0:
            yield Visit(place + 1 - within, is_first=False)


class Trainee(Contender):
    """A contender that trains: its batches change, and so do its weights."""

    def __init__(self, name: str, model: PreTrainedModel, batch: Batch, policy: Policy | None = None) -> None:
        super().__init__(name, model, batch, policy)
        if policy is not None:  # on a copy, which knows nothing yet of what the profile has recorded
            self.handle.library.take(library_of_profiles(model))
        self.losses: list[float] = []
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._loss = torch.empty(())

    def step(self) -> None:
        """One forward and backward, which leave their loss and gradients here."""
        loss = self.model(**self.batch).loss
        loss.backward()
        self._loss = loss.detach()

    def train(self, batch: Batch, seed: int, clock: str) -> float:
        """Milliseconds of one forward and backward. The optimizer, equal for all methods, runs after it."""
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
    """At each new size."""
    later: dict[int, list[float]] = field(default_factory=dict)
    """Again at the size of that place."""
    fixed: list[float] = field(default_factory=list)
    """At the fixed size, FIXED_STEPS in each turn."""

    def first_of_later(self) -> list[float]:
        """For each size that came again, its first step over the median of the later ones."""
        return [self.first[place] / statistics.median(ms) for place, ms in self.later.items()]

    def of(self, other: Times) -> Times:
        """The times as parts of those of `other` on the same batches, without unit."""
        return Times(
            first=_ratios(self.first, other.first),
            later={place: _ratios(ms, other.later[place]) for place, ms in self.later.items()},
            fixed=_ratios(self.fixed, other.fixed),
        )


def measure_case(
    case: LengthCase, scale: Scale, budgets: Sequence[float], clock: str, settings: Settings
) -> dict[str, Any]:
    """The figures of every method of one case.

    Raises RedGateError on wrong gradients at the fixed size, and if what is to be bit-equal has not trained to the
    losses of plain training.
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
    changing = [Trainee(name, model, example, policy) for name, policy in policies.items()]
    still = [Trainee(name, model, example, policy) for name, policy in policies.items()]
    errors = check_gradients(changing)
    check_gradients(still)
    stored_bytes = {trainee.name: trainee.memory().stored_bytes for trainee in still}

    def batch_of(size: Size, seed: int) -> Batch:
        return case.make_batch(scale, size, settings.device, seed)

    times = train_in_turn(changing, still, sizes, fixed, batch_of, clock)
    drifts = check_losses(changing)
    check_losses(still)
    figures = figures_of(times)
    for trainee in changing:
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
    """The methods by name, with the policy of those that have one, and the budgets that nothing fits."""
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
    """The times of all methods, on the same batches.

    All take a turn of PART new sizes before the next ones come, so that a busy machine slows all alike; who goes first
    changes. Within a turn a method trains on as it would alone: its first step, for which others have left the
    machine's caches full of their own, is at the fixed size and not timed.
    """
    times = {trainee.name: Times() for trainee in changing}
    orders = deque(changing), deque(still)
    turns = [list(turn) for _, turn in groupby(visits(len(sizes)), key=lambda visit: visit.place // PART)]
    seed = 0
    for turn in tqdm(turns, desc="training", unit="turn", leave=False):
        for trainee in orders[0]:
            found = times[trainee.name]
            trainee.train(batch_of(fixed, seed), seed, clock)
            for own_seed, visit in enumerate(turn, seed + 1):
                ms = trainee.train(batch_of(sizes[visit.place], own_seed), own_seed, clock)
                (found.first if visit.is_first else found.later.setdefault(visit.place, [])).append(ms)
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
    """The largest relative difference of each method's losses from those of the first, over all steps.

    Raises RedGateError on a CPU if that of a method that is to be bit-equal is not 0. A GPU adds in no fixed order, and
    training makes much of the least difference.
    """
    expected, drifts = trainees[0].losses, {}
    for trainee in trainees:
        pairs = zip(trainee.losses, expected, strict=True)
        drift = max(abs(found / other - 1.0) for found, other in pairs)
        if drift and trainee.is_lossless and not trainee.other_sums and trainee.device.type == "cpu":
            raise RedGateError(
                f"{trainee.name}: the losses of {len(expected)} steps differ from those of {trainees[0].name}, by up "
                f"to {drift:.3g} of them"
            )
        drifts[trainee.name] = drift
    return drifts


def figures_of(times: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """Per method its step time at new sizes, and what that is of plain's, of checkpointing's, and of its own elsewhere.

    Ratios are of medians; beside them stand the spreads of the ratios of single steps, in which both met the same batch
    and machine. No two steps at a new size and at the fixed one, or at a size for the first time and later, have the
    same batch: "beside_plain" is by how much more a method's times differ there than plain training's do.
    """
    figures: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        beside = own.of(times[PLAIN])
        spread, fixed = Spread.of(own.first), Spread.of(own.fixed)
        figures[name] = {
            "steps_ms": own.first,
            "step_ms": spread,
            "fixed_step_ms": fixed,
            "of_fixed": spread.median / fixed.median,
            "of_fixed_beside_plain": statistics.median(beside.first) / statistics.median(beside.fixed),
            "of_fixed_beside_plain_by_turn": Spread.of(
                _ratios(_by_turn(beside.first, PART), _by_turn(beside.fixed, FIXED_STEPS))
            ),
            "first_of_later": Spread.of(own.first_of_later()),
            "first_of_later_beside_plain": Spread.of(beside.first_of_later()),
            "mean_of_plain": statistics.mean(own.first) / statistics.mean(times[PLAIN].first),
        }
        for base, label in ((PLAIN, "plain"), (CHECKPOINTING, "checkpointing")):
            figures[name][f"of_{label}"] = spread.median / statistics.median(times[base].first)
            figures[name][f"of_{label}_by_step"] = Spread.of(own.of(times[base]).first)
    return figures


def _by_turn(ratios: Sequence[float], size: int) -> list[float]:
    """The median of every turn's `size` ratios, of which the last may have fewer."""
    return [statistics.median(ratios[start : start + size]) for start in range(0, len(ratios), size)]


def _ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    return [ms / base for ms, base in zip(own, other, strict=True)]
