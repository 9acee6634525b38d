"""Adacc's share of the possible speed gain, from invented points and from a tiny model with interleaved methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from adacc_hf.artifacts.files import write_json
from adacc_hf.eval import headline
from adacc_hf.eval.records.points import points_text
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials import interleaved
from adacc_hf.eval.trials.isolation import OverLimitError, run_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the config of a GPT-2 whose larger activations are at least 64 KiB, so that they may be
    compressed."""
    path = tmp_path_factory.mktemp("model")
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=256)
    config.bos_token_id = config.eos_token_id = None
    config.save_pretrained(path)
    return str(path)


@pytest.fixture
def subject(folder: str) -> dict[str, Any]:
    return {"preset": folder, "batch": 8, "tokens": 64}


@pytest.fixture
def no_arena():
    """Clear the cached models before and after the test."""
    interleaved.arena_of.cache_clear()
    yield
    interleaved.arena_of.cache_clear()


def test_the_share_is_that_of_the_time_between_checkpointing_and_plain() -> None:
    """The machine is slower in each round. Ratios are computed within a round."""
    seconds = {"none": [3.0, 6.0, 9.0], "full": [4.0, 8.0, 12.0], "adacc": [3.2, 6.4, 9.6]}
    ratios = interleaved.comparison(seconds, "adacc")
    assert ratios["over_checkpointing"].median == pytest.approx(1.25)
    assert ratios["plain_over_checkpointing"].low == ratios["plain_over_checkpointing"].high == pytest.approx(4 / 3)
    assert ratios["share_won"] == pytest.approx(0.8)
    assert interleaved.comparison(seconds, "full")["share_won"] == 0.0
    assert interleaved.comparison({"none": [3.0]}, "none") == {}
    without_plain = interleaved.comparison({"full": [4.0], "adacc": [3.2]}, "adacc")
    assert without_plain["over_checkpointing"].median == pytest.approx(1.25)
    assert "share_won" not in without_plain
    nothing_to_win = interleaved.comparison({"none": [4.0], "full": [4.0], "adacc": [4.0]}, "adacc")
    assert nothing_to_win["share_won"] is None


@pytest.mark.usefixtures("no_arena")
def test_a_tiny_model_from_end_to_end(tmp_path: Path, folder: str) -> None:
    """All methods take turns on one model. Each point is recorded with its ratios as soon as it is measured."""
    output = tmp_path / "headline.json"
    point_texts: list[str] = []

    def run(function, order, timeout_s):
        point_texts.append(points_text(tmp_path) if output.is_file() else "")
        return run_here(function, order)

    argv = ["--preset", folder, "--batch", "8", "--tokens", "64", "--rounds", "2", "--output", str(output)]
    assert headline.main(argv, run) == 0
    record = json.loads(output.read_text())
    check_record(record)
    points = record["train_info"]["points"]
    assert list(points) == ["none", "full", "adacc", "adacc_lossless", "quantization", "adacc_in_floor"]
    assert points["adacc_in_floor"]["peak_bytes"] <= points["full"]["peak_bytes"]
    assert record["train_info"]["goals"] == {"adacc": 0.85, "adacc_in_floor": 0.65}
    assert {point["status"] for point in points.values()} == {"measured"}
    assert points["adacc_lossless"]["gate"] == points["full"]["gate"]
    for name in ("adacc", "adacc_lossless", "quantization"):
        decided = points[name]["decided"]
        assert decided["predicted_stored_bytes"] <= 0.5 * decided["plain_stored_bytes"]
        assert points[name]["peak_bytes"] < points["none"]["peak_bytes"]
        assert {"over_checkpointing", "plain_over_checkpointing", "share_won"} <= points[name].keys()
        assert points[name]["num_alloc_retries"] == 0
    assert "adacc: " in point_texts[3]
    assert " x checkpointing where plain is " in point_texts[3]
    assert "| Adacc, lossless" in output.with_suffix(".md").read_text()


@pytest.mark.usefixtures("no_arena")
def test_all_methods_share_parameters_which_no_step_moves(subject: dict) -> None:
    arena = interleaved.arena_of(tuple(subject.items()))
    parameters_before = [parameter.detach().clone() for parameter in arena.model.parameters()]
    interleaved.run_interleaved(subject, "adacc", 0.5, rounds=2)
    assert list(arena.entrants) == ["none", "full", "adacc"]
    calls = [entrant.installed.call for entrant in arena.entrants.values()]
    owned = [[id(parameter) for parameter in model.parameters()] for model in [arena.model, *calls]]
    assert all(own == owned[0] for own in owned)
    assert len({id(call) for call in calls}) == 3
    assert all(map(torch.equal, parameters_before, arena.model.parameters()))


@pytest.mark.usefixtures("no_arena")
def test_a_limit_is_the_methods_and_not_the_ceilings(subject: dict) -> None:
    plain = interleaved.run_interleaved(subject, "none", limit_bytes=1, rounds=1)
    limit = plain["peak_bytes"] - 1
    with pytest.raises(OverLimitError, match="the step takes") as error_info:
        interleaved.run_interleaved(subject, "full", limit_bytes=plain["static_bytes"], rounds=1)
    assert set(error_info.value.figures) == {"static_bytes", "peak_bytes"}
    figures = interleaved.run_interleaved(subject, "adacc", limit, limit_bytes=limit, rounds=1)
    assert figures["peak_bytes"] <= limit


@pytest.mark.usefixtures("no_arena")
def test_what_fails_leaves_the_others_their_figures(subject: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ceiling, plain training, the record has a ratio and no share."""

    def fail(bench, budget):
        raise torch.OutOfMemoryError("CUDA out of memory")

    broken = headline.HEADLINE_METHODS["none"]
    monkeypatch.setitem(interleaved.HEADLINE_METHODS, "none", type(broken)(title="plain", install=fail))
    figures = interleaved.run_interleaved(subject, "adacc_lossless", 0.5, rounds=1)
    assert "share_won" not in figures
    assert figures["over_checkpointing"]["median"] > 0
    assert run_here(interleaved.run_interleaved, {"subject": subject, "method": "none"})["status"] == "out_of_memory"


def test_without_a_peak_of_checkpointing_adacc_has_no_budget_there(tmp_path: Path) -> None:
    orders: list[dict[str, Any]] = []

    def run(function, order, timeout_s):
        orders.append(order)
        return {"status": "out_of_memory", "reason": "too large"}

    output = tmp_path / "headline.json"
    argv = ["--methods", "full", "adacc", "adacc_in_floor", "--limit", "64MiB", "--output", str(output)]
    assert headline.main(argv, run) == 0
    assert [order["method"] for order in orders] == ["full", "adacc"]
    assert {order["budget"] for order in orders} == {64 * 2**20}
    record = json.loads(output.read_text())["train_info"]
    assert record["goals"] == {"adacc_in_floor": 0.65}
    assert "whose peak is the budget, was not measured" in record["points"]["adacc_in_floor"]["reason"]


def test_points_are_written_with_their_ratios(tmp_path: Path) -> None:
    spread = {"low": 1.0, "median": 1.25, "high": 1.5}
    point = {
        "status": "measured",
        "peak_bytes": 2**30,
        "tokens_per_second": {"low": 9.0, "median": 10.0, "high": 11.0},
        "over_checkpointing": spread,
        "plain_over_checkpointing": spread | {"median": 1.3},
        "share_won": 0.866,
        "num_alloc_retries": 3,
    }
    meta = {"status": "running", "date": "today", "device": "GPU"}
    write_json(tmp_path / "headline.json", {"train_info": {"points": {"adacc": point}}, "meta_info": meta})
    assert points_text(tmp_path).splitlines()[-1] == (
        "- adacc: 10 (9 to 11) tokens/s, peak 1.00 GiB, 1.250 x checkpointing where plain is 1.300 x, 87% of what "
        "can be won, 3 allocator retries while timed"
    )


@pytest.mark.parametrize("argv", [["--fraction", "0"], ["--fraction", "1.5"]])
def test_a_fraction_is_one(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--fraction=.* must be in \(0, 1\]"):
        headline.main(argv)
