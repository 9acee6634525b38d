"""Methods on copies of one model, timed in turn: plain training and checkpointing take part in every round.

All copies share the parameters and the optimizer, so that their number costs no memory. What a machine's clock or its
other users do meets all methods of a round alike.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf.eval.records.clock import CLOCKS
from adacc_hf.eval.records.records import Figures, share_of_what_can_be_won
from adacc_hf.eval.trials.barrier import Reference, check, reference_gradients
from adacc_hf.eval.trials.methods import HEADLINE_METHODS, Bench, Budget, Installed
from adacc_hf.eval.trials.model_under_test import Subject
from adacc_hf.eval.trials.trial import check_limit, memory_figures, num_alloc_retries, warm_up
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json

CEILING, FLOOR = "none", "full"
"""The methods between which is what can be won: plain training, and checkpointing."""


def run_interleaved(
    subject: Figures,
    method: str,
    budget: Budget | None = None,
    limit_bytes: int | None = None,
    rounds: int = 5,
    clock: str = "wall",
    threads: int = 1,
) -> Figures:
    """What one method decided, its gate, its peak, and the time of its steps in turn with those of CEILING and FLOOR.

    A later call in the same process finds the model and what was installed on its copies. Raises as `run_trial` does.
    """
    torch.set_num_threads(threads)
    arena = arena_of(tuple(subject.items()))
    # The ceiling alone has no round with the floor, which takes time to enter: the first figure comes first.
    names = list(dict.fromkeys([CEILING] if method == CEILING else [CEILING, FLOOR, method]))
    for name in names[:-1]:
        arena.try_enter(name)
    figures = arena.enter(method, budget)
    check_limit(figures, None if method == CEILING else limit_bytes)
    return figures | arena.race(names, rounds, clock)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A method in force on its own copy of the model."""

    installed: Installed
    figures: Figures


class Arena:
    """A subject's model, and the methods that were installed on copies of it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.model = subject.model()
        self.batch = subject.example()
        # Steps take what they take at any rate, and at 0 the weights stay those that the gate's reference is of.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.device = torch.device(subject.device)
        self.entrants: dict[str, Entrant] = {}
        self._failed: set[str] = set()
        warm_up(self._bench(self.model))
        self.reference: Reference = reference_gradients(subject, self.model, self.batch)

    def try_enter(self, name: str) -> None:
        """Install a method that others are compared with. Where it fails they go without."""
        if name not in self._failed:
            try:
                self.enter(name, None)
            except Exception:
                self._failed.add(name)

    def enter(self, name: str, budget: Budget | None) -> Figures:
        """Install a method, check its gradients and measure its peak. Raises as `run_trial` does."""
        if name not in self.entrants:
            try:
                self.entrants[name] = self._entered(name, budget)
            finally:
                self._tidy()
        return dict(self.entrants[name].figures)

    def _entered(self, name: str, budget: Budget | None) -> Entrant:
        self._tidy()
        model = self._shared_copy()
        bench = self._bench(model)
        installed = HEADLINE_METHODS[name].install(bench, budget)
        gate = check(self.subject, model, installed, self.reference)
        self._tidy()
        figures: Figures = {"decided": installed.facts, "gate": gate, **memory_figures(bench, installed)}
        return Entrant(installed=installed, figures=figures)

    def race(self, names: Sequence[str], rounds: int, clock: str) -> Figures:
        """The times of the last of `names`, and beside them those of the others in the same rounds."""
        now = CLOCKS[clock]
        order = deque(name for name in names if name in self.entrants)
        own = names[-1]
        seconds: dict[str, list[float]] = {name: [] for name in order}
        retries = 0
        for name in order:  # not timed: after `_tidy` memory is taken from the device again
            self._step(name)
        for _ in tqdm(range(rounds), desc=f"{own}, in turn", unit="round", leave=False):
            for name in order:
                before = num_alloc_retries(self.device)
                seconds[name].append(seconds_of(partial(self._step, name), self.device, now))
                if name == own:
                    retries += num_alloc_retries(self.device) - before
            order.rotate(1)
        tokens = self.batch["input_ids"].numel()
        figures: dict[str, Any] = {
            "step_ms": _spread_ms(seconds[own]),
            "tokens_per_second": Spread.of([tokens / s for s in seconds[own]]),
            "num_alloc_retries": retries,
        }
        return to_json(figures | comparison(seconds, own))

    def _step(self, name: str) -> None:
        self.subject.train_step(self.entrants[name].installed.call, self.batch, self.optimizer)

    def _bench(self, model: PreTrainedModel) -> Bench:
        return Bench(subject=self.subject, model=model, batch=self.batch, optimizer=self.optimizer)

    def _shared_copy(self) -> PreTrainedModel:
        """A copy of the model whose parameters and buffers are the model's own."""
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def _tidy(self) -> None:
        """Give back what the last method left: its peak is not the next one's."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


@lru_cache(maxsize=1)
def arena_of(subject: tuple[tuple[str, Any], ...]) -> Arena:
    """The arena of a subject's fields, which this process has one of at most."""
    return Arena(Subject(**dict(subject)))


def comparison(seconds: Mapping[str, Sequence[float]], own: str) -> dict[str, Any]:
    """How a method's steps compare with those of CEILING and FLOOR, where these took part: ratios of speeds in a round.

    Medians over the rounds, in which all met the same machine; so is the share that is worked out from them.
    """
    if own == CEILING or FLOOR not in seconds:
        return {}
    floor_ms = {"checkpointing_step_ms": _spread_ms(seconds[FLOOR])} if own != FLOOR else {}
    found: dict[str, Any] = {**floor_ms, "over_checkpointing": _ratios(seconds, own)}
    if CEILING in seconds:
        ceiling = _ratios(seconds, CEILING)
        found |= {"plain_step_ms": _spread_ms(seconds[CEILING]), "plain_over_checkpointing": ceiling}
        own_part, ceiling_part = 1 / found["over_checkpointing"].median, 1 / ceiling.median
        found["share_won"] = share_of_what_can_be_won(1.0, ceiling_part, own_part)
    return found


def _ratios(seconds: Mapping[str, Sequence[float]], own: str) -> Spread:
    """The speed of a method over that of FLOOR in the same round."""
    return Spread.of([floor / mine for floor, mine in zip(seconds[FLOOR], seconds[own], strict=True)])


def _spread_ms(seconds: Sequence[float]) -> Spread:
    return Spread.of([1e3 * one for one in seconds])
