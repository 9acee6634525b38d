"""Timing of methods on copies of one model, in turn: plain training and checkpointing take part in every round.

All copies share the parameters and the optimizer, so that more copies take no more memory. Changes of the machine's
clock or load affect all methods of a round alike.
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
from adacc_hf.eval.records.records import Figures, share_of_possible_gain
from adacc_hf.eval.trials.barrier import Reference, check, reference_gradients
from adacc_hf.eval.trials.methods import HEADLINE_METHODS, Bench, Budget, InstalledMethod
from adacc_hf.eval.trials.model_under_test import Subject
from adacc_hf.eval.trials.trial import check_limit, memory_figures, num_alloc_retries, warm_up
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import Spread, to_json

CEILING, FLOOR = "none", "full"
"""Methods whose speeds bound the possible gain: plain training, and checkpointing."""


def run_interleaved(
    subject: Figures,
    method: str,
    budget: Budget | None = None,
    limit_bytes: int | None = None,
    rounds: int = 5,
    clock: str = "wall",
    threads: int = 1,
) -> Figures:
    """Run one method: return its decisions, gradient check, peak, and step times in turn with CEILING and FLOOR.

    Later calls in the same process reuse the model and the methods installed on its copies. Raise like `run_trial`.
    """
    torch.set_num_threads(threads)
    arena = arena_of(tuple(subject.items()))
    # Measuring the ceiling does not wait for installing the floor, so that the first figure comes early.
    names = list(dict.fromkeys([CEILING] if method == CEILING else [CEILING, FLOOR, method]))
    for name in names[:-1]:
        arena.try_enter(name)
    figures = arena.enter(method, budget)
    check_limit(figures, None if method == CEILING else limit_bytes)
    return figures | arena.race(names, rounds, clock)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """Method installed on its own copy of the model."""

    installed: InstalledMethod
    figures: Figures


class Arena:
    """A subject's model, and the methods installed on copies of it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.model = subject.model()
        self.batch = subject.example()
        # A learning rate of 0 keeps the weights of the gradient check's reference; the cost of a step does not depend
        # on it.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.device = torch.device(subject.device)
        self.entrants: dict[str, Entrant] = {}
        self._failed: set[str] = set()
        warm_up(self._bench(self.model))
        self.reference: Reference = reference_gradients(subject, self.model, self.batch)

    def try_enter(self, name: str) -> None:
        """Install a reference method. If that fails, the others are measured without it."""
        if name not in self._failed:
            try:
                self.enter(name, None)
            except Exception:
                self._failed.add(name)

    def enter(self, name: str, budget: Budget | None) -> Figures:
        """Install a method, check its gradients and measure its peak. Raise like `run_trial`."""
        if name not in self.entrants:
            try:
                self.entrants[name] = self._install(name, budget)
            finally:
                self._free_memory()
        return dict(self.entrants[name].figures)

    def _install(self, name: str, budget: Budget | None) -> Entrant:
        self._free_memory()
        model = self._shared_copy()
        bench = self._bench(model)
        installed = HEADLINE_METHODS[name].install(bench, budget)
        gate = check(self.subject, model, installed, self.reference)
        self._free_memory()
        figures: Figures = {"decided": installed.facts, "gate": gate, **memory_figures(bench, installed)}
        return Entrant(installed=installed, figures=figures)

    def race(self, names: Sequence[str], rounds: int, clock: str) -> Figures:
        """Time the last of `names`, in rounds with the others; return its times and the comparison with theirs."""
        now = CLOCKS[clock]
        order = deque(name for name in names if name in self.entrants)
        own = names[-1]
        seconds: dict[str, list[float]] = {name: [] for name in order}
        retries = 0
        for name in order:  # not timed: after `_free_memory` the device allocates anew
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
        """Return a copy of the model that shares the model's parameters and buffers."""
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})

    def _free_memory(self) -> None:
        """Free the memory of the last method, and reset the peak for the next one."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


@lru_cache(maxsize=1)
def arena_of(subject: tuple[tuple[str, Any], ...]) -> Arena:
    """Return the arena of a subject's fields. A process has at most one."""
    return Arena(Subject(**dict(subject)))


def comparison(seconds: Mapping[str, Sequence[float]], own: str) -> dict[str, Any]:
    """Return the ratios of speeds to CEILING and FLOOR in the same rounds, if these took part.

    All figures are medians over rounds, in which the machine's state was equal for all; the share won follows from
    them.
    """
    if own == CEILING or FLOOR not in seconds:
        return {}
    floor_ms = {"checkpointing_step_ms": _spread_ms(seconds[FLOOR])} if own != FLOOR else {}
    figures: dict[str, Any] = {**floor_ms, "over_checkpointing": _ratios(seconds, own)}
    if CEILING in seconds:
        ceiling = _ratios(seconds, CEILING)
        figures |= {"plain_step_ms": _spread_ms(seconds[CEILING]), "plain_over_checkpointing": ceiling}
        own_part, ceiling_part = 1 / figures["over_checkpointing"].median, 1 / ceiling.median
        figures["share_won"] = share_of_possible_gain(1.0, ceiling_part, own_part)
    return figures


def _ratios(seconds: Mapping[str, Sequence[float]], own: str) -> Spread:
    """Return the speed of a method divided by that of FLOOR in the same round."""
    return Spread.of([floor_s / own_s for floor_s, own_s in zip(seconds[FLOOR], seconds[own], strict=True)])


def _spread_ms(seconds: Sequence[float]) -> Spread:
    return Spread.of([1e3 * step_s for step_s in seconds])
