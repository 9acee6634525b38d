"""Training on batches of ever new sizes, with models so small that the times carry no information."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adacc_hf.eval import changing_lengths, lengths
from adacc_hf.eval.changing_lengths import (
    FIXED_STEPS,
    PART,
    PAUSE,
    Times,
    check_losses,
    figures_of,
    measure_case,
    visits,
)
from adacc_hf.eval.length_trainings import LEFT_OUT, TRAINER, StepInTurn, Training, Turns, check_trainings, run_in_turn
from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials.contenders import CHECKPOINTING, GATE_STEPS, PLAIN
from adacc_hf.eval.trials.length_cases import LENGTH_CASES, Scale
from adacc_hf.reports.run_record import Settings

TINY = Scale(width=32, layers=2, heads=2, batch=2, shortest=12, longest=24, steps=PAUSE)
METHODS = [PLAIN, CHECKPOINTING, "Adacc, 50% of plain", "Adacc lossless, 50% of plain"]


def run(output: Path, *argv: str) -> int:
    options = ["--cases", "llama_padded", TRAINER, "--output", str(output), *argv]
    return lengths.main(options, TINY, Scale(**{**vars(TINY), "steps": LEFT_OUT + 2}))


def test_a_run_is_a_record_with_tables_and_a_plot(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    output = tmp_path / "lengths.json"
    assert run(output) == 0
    record = json.loads(output.read_text())
    check_record(record)
    points = record["train_info"]["points"]
    assert list(points) == ["llama_padded", TRAINER]
    assert [row["tried"] for row in record["train_info"]["goals"]] == [2, 2, 2]
    text = output.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert [part.splitlines()[0].split("|")[1].strip() for part in text.split("\n\n") if part.startswith("|")] == [
        "model",
        "figure of Adacc",
        "method",
    ]
    assert output.with_suffix(".svg").read_text().startswith("<?xml")

    trainings = points[TRAINER]["trainings"]
    assert list(trainings) == METHODS
    assert trainings[PLAIN]["loss"] == trainings[CHECKPOINTING]["loss"] == trainings[METHODS[3]]["loss"]
    assert {row["policy_step"] for row in trainings.values()} == {None, 0}
    assert all(len(row["steps_ms"]) == 2 for row in trainings.values())

    monkeypatch.setattr(lengths, "_measure", lambda *_: pytest.fail("measured again"))
    assert run(output, "--resume") == 0


@pytest.mark.parametrize("name", ["gpt2", "t5", "moe_loop", "qwen2_vl"])
def test_methods_train_alike_on_sizes_that_never_repeat(name: str, tmp_path: Path) -> None:
    settings = Settings(runner="lengths", output=tmp_path / "lengths.json")
    point = measure_case(LENGTH_CASES[name], TINY, [0.5], "wall", settings)
    sizes, methods = point["sizes"], point["methods"]
    assert len(set(sizes)) == TINY.steps
    assert point["left_out"] == GATE_STEPS
    assert [*methods, *point["skipped"]] == METHODS
    for method, row in methods.items():
        assert len(row["steps_ms"]) == TINY.steps
        if method != METHODS[2]:
            assert (row["loss_drift"], row["gradient_error"]) == (0.0, 0.0)
    fallbacks = methods[METHODS[3]]["fallbacks"]
    assert sum(fallbacks.values()) == (TINY.layers if name == "moe_loop" else 0)


def test_losses_that_differ_end_the_run(tmp_path, capsys, monkeypatch):
    def fail(*_: Any) -> None:
        raise WrongResultError("they differ")

    monkeypatch.setattr(changing_lengths, "check_losses", fail)
    assert run(tmp_path / "lengths.json") == 1
    assert "adacc eval lengths: llama_padded: they differ" in capsys.readouterr().err
    assert not (tmp_path / "lengths.json").exists()


def trainee(name: str, losses: list[float], device: str = "cpu", is_lossless: bool = True) -> SimpleNamespace:
    kind = torch.device(device)
    return SimpleNamespace(name=name, losses=losses, is_lossless=is_lossless, other_sums=False, device=kind)


def test_what_is_lossless_must_train_to_the_losses_of_plain() -> None:
    plain, same, other_losses = trainee(PLAIN, [4.0, 2.0]), trainee("same", [4.0, 2.0]), [4.0, 2.5]
    assert check_losses([plain, same, trainee("lossy", other_losses, is_lossless=False)]) == {
        PLAIN: 0.0, "same": 0.0, "lossy": 0.25,
    }  # fmt: skip
    with pytest.raises(
        WrongResultError,
        match=r"off: the losses of 2 steps differ from the losses of plain, by a factor of up to 1 \+ 0.25",
    ):
        check_losses([plain, trainee("off", other_losses)])
    # A GPU's sums have no fixed order.
    assert check_losses([plain, trainee("off", other_losses, "cuda")])["off"] == 0.25


def test_the_trainers_losses_are_compared_too() -> None:
    def ended(loss: float) -> Training:
        return Training(steps_ms=[1.0], loss=loss, policy_step=None, num_policies=0)

    results = {PLAIN: ended(2.0), "off": ended(2.5)}
    check_trainings(results, "cuda")
    with pytest.raises(
        WrongResultError, match=r"off: the mean loss of the Trainer's steps is 2.5, but must equal plain"
    ):
        check_trainings(results, "cpu")


def test_every_size_comes_once_and_some_again() -> None:
    steps = list(visits(2 * PART + 1))
    assert [visit.place for visit in steps if visit.is_first] == list(range(2 * PART + 1))
    again = [visit.place for visit in steps if not visit.is_first]
    assert again == [0] * (PART // PAUSE) + [PART] * (PART // PAUSE)
    first = {visit.place: number for number, visit in enumerate(steps) if visit.is_first}
    assert all(first[visit.place] < number for number, visit in enumerate(steps) if not visit.is_first)


def test_figures_are_ratios_on_the_same_batches() -> None:
    """Plain training needs 1 ms per token, and 10 at the fixed size. Checkpointing needs twice that, and three times at
    a first step."""
    plain_ms = [float(ms) for ms in range(6, 15)]
    plain = Times(first=plain_ms, later={0: [6.0, 6.0, 9.0]}, fixed=[10.0] * FIXED_STEPS)
    checkpointing = Times(first=[3 * ms for ms in plain_ms], later={0: [12.0, 12.0, 18.0]}, fixed=[20.0] * FIXED_STEPS)
    row = figures_of({PLAIN: plain, CHECKPOINTING: checkpointing})[CHECKPOINTING]
    assert (row["of_plain"], row["mean_of_plain"], row["of_checkpointing"]) == (3.0, 3.0, 1.0)
    assert row["of_plain_by_step"].low == row["of_plain_by_step"].high == 3.0
    assert row["of_fixed"] == row["of_fixed_beside_plain"] == row["of_fixed_beside_plain_by_turn"].median == 1.5
    assert row["first_of_later"].median == row["first_of_later_beside_plain"].median == 1.5


def test_goals_are_of_adacc_alone() -> None:
    def point(ratio: float) -> dict[str, Any]:
        figures = {name: ratio if name == "of_checkpointing" else {"median": ratio} for name in lengths.GOALS}
        return {"methods": {PLAIN: {}, CHECKPOINTING: {}, "Adacc": figures}}

    first = lengths.goals_of({"gpt2": point(0.9), "bert": point(1.1)})[0]
    assert (first["asked"], first["kept"], first["tried"]) == (1.05, 1, 2)
    assert (first["worst"], first["where"]) == (1.1, "BERT, padded: Adacc")


@pytest.mark.parametrize(
    ("option", "message"),
    [("--budgets=2", r"--budgets=\[2.0\] must be fractions in \(0, 1\]"), ("--steps=14", "there are 13 lengths")],
)
def test_settings_that_cannot_be_are_refused(option: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "lengths.json", option)


def test_a_trainers_run_without_counted_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=f"steps={LEFT_OUT} must be more than {LEFT_OUT}, the number of first steps that are not counted",
    ):
        run(tmp_path / "lengths.json", "--cases", TRAINER, f"--steps={LEFT_OUT}")


def test_turns_go_round_until_each_has_left() -> None:
    step_order: list[str] = []

    def run(name: str, steps: int, turns: Turns, member: int) -> str:
        for step in range(steps):
            turns.pass_on(member)
            step_order.append(f"{name}{step}")
        return name

    runs = [partial(run, "a", 3), partial(run, "b", 1), partial(run, "c", 2)]
    assert run_in_turn(runs, torch.get_num_threads()) == ["a", "b", "c"]
    assert step_order == ["a0", "b0", "c0", "a1", "c1", "a2"]


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
