"""Runs in threads of which one goes on at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from adacc_hf.eval.trials.turns import StepInTurn, Turns, run_in_turn


def test_turns_go_round_until_each_has_left() -> None:
    seen: list[str] = []

    def run(name: str, steps: int, turns: Turns, member: int) -> str:
        for step in range(steps):
            turns.pass_on(member)
            seen.append(f"{name}{step}")
        return name

    runs = [partial(run, "a", 3), partial(run, "b", 1), partial(run, "c", 2)]
    assert run_in_turn(runs, torch.get_num_threads()) == ["a", "b", "c"]
    assert seen == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_a_failure_is_raised_after_the_others_have_ended() -> None:
    ended = []

    def fail(turns: Turns, member: int) -> None:
        turns.pass_on(member)
        raise ValueError("broken")

    def end(turns: Turns, member: int) -> None:
        for _ in range(3):
            turns.pass_on(member)
        ended.append(member)

    with pytest.raises(ValueError, match="broken"):
        run_in_turn([fail, end], torch.get_num_threads())
    assert ended == [1]


def test_a_step_is_all_that_was_done_but_the_waiting() -> None:
    now = 0.0

    class Others:
        def pass_on(self, member: int) -> None:
            nonlocal now
            now += 100.0

    steps = StepInTurn(Others(), 0, lambda: now)
    steps.on_train_begin(None, None, None)
    for _ in range(2):
        now += 1.0
        steps.on_step_begin(None, None, None)
        now += 10.0
        steps.on_step_end(None, None, None)
    assert steps.seconds == [11.0, 11.0]
