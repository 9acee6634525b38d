"""Trainings that take turns: each in a thread of its own, one step at a time, and never two at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback

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
