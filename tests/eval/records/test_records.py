"""The JSON and the Markdown that runners leave."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from adacc_hf.eval.records import records
from adacc_hf.eval.records.records import (
    Settings,
    Spread,
    add_settings,
    make_record,
    markdown_table,
    positive_int,
    to_json,
)


def parsed(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser, "bench")
    return Settings.from_arguments(parser.parse_args(argv))


def test_spread_is_of_percentiles() -> None:
    assert Spread.of([float(value) for value in range(11)]) == Spread(low=2.0, median=5.0, high=8.0)


def test_spread_of_one_sample() -> None:
    assert Spread.of([3.0]) == Spread(low=3.0, median=3.0, high=3.0)


def test_record_has_the_three_parts() -> None:
    settings = parsed("--seed", "7", "--notes", "busy")
    record = make_record(settings, {"rounds": 3}, {"step_ms": Spread.of([1.0])}, "complete")
    assert record["run_info"] == {"runner": "bench", "rounds": 3, "seed": 7, "threads": 1, "device": "cpu"}
    assert record["train_info"] == {"step_ms": {"low": 1.0, "median": 1.0, "high": 1.0}}
    meta = record["meta_info"]
    assert (meta["status"], meta["seeds"], meta["notes"]) == ("complete", [7], "busy")
    assert meta["versions"]["torch"] == torch.__version__
    assert set(meta) == {"status", "date", "commit", "uncommitted_changes", "device", "seeds", "versions", "notes"}


def test_record_outside_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.adacc_hf, "__file__", str(tmp_path / "adacc_hf" / "__init__.py"))
    meta = records.meta_info(parsed())
    assert (meta["commit"], meta["uncommitted_changes"]) == (None, None)


def test_settings_take_effect() -> None:
    parsed("--threads", "2")
    assert torch.get_num_threads() == 2


def test_each_device_has_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parsed().output == Path("runs/eval/cpu/bench.json")
    assert parsed("--device", "cuda").output == Path("runs/eval/cuda/bench.json")
    assert parsed("--device", "cuda", "--output", "mine.json").output == Path("mine.json")


@pytest.mark.parametrize("threads", ["0", "-1"])
def test_settings_refuse_no_threads(threads: str) -> None:
    with pytest.raises(ValueError, match=f"--threads={threads} must be 1 or more"):
        parsed("--threads", threads)


@pytest.mark.parametrize("text", ["0", "-2", "1.5", "many", ""])
def test_counts_are_positive(text: str) -> None:
    assert positive_int("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of 1 or more"):
        positive_int(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_settings_refuse_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="sees no CUDA device: use --device=cpu"):
        parsed("--device", "cuda")


def test_to_json_goes_all_the_way_down() -> None:
    one = Spread.of([1.0])
    plain = {"low": 1.0, "median": 1.0, "high": 1.0}
    assert to_json({"a": [one], "b": {"c": one}, "d": 1}) == {"a": [plain], "b": {"c": plain}, "d": 1}


def test_markdown_table_is_aligned() -> None:
    rows = [{"method": "plain", "ms": "1.0"}, {"method": "x", "ms": "10.25"}]
    assert markdown_table(rows).splitlines() == [
        "| method |    ms |",
        "| ------ | ----: |",
        "| plain  |   1.0 |",
        "| x      | 10.25 |",
    ]
