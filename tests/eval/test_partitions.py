"""The partitioner's promises, on one small model; the runner checks many."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from adacc_hf.eval import partitions
from adacc_hf.eval.schemas import check_record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output: Path = tmp_path_factory.mktemp("partitions") / "partitions.json"
    assert partitions.main(["--models", "gpt2, eager, fp32", "--output", str(output)]) == 0
    return json.loads(output.read_text())


def test_one_model_keeps_every_promise(record: dict) -> None:
    check_record(record)
    (point,) = record["train_info"]["points"].values()
    assert all(0 < trial["stored_bytes"] <= trial["share"] * trial["plain_bytes"] for trial in point["lossless"])
    assert point["lossy"]["gradient_error"] > 0


@pytest.mark.parametrize(
    ("trial", "change"),
    [
        ("lossless", {"same_bits": False}),
        ("lossless", {"stored_bytes": 1}),
        ("lossless", {"overhead_ms": 1e6}),
        ("lossy", {"gradient_error": 1.0}),
        ("lossy", {"stored_bytes": 1}),
    ],
)
def test_a_broken_promise_is_seen(record: dict, trial: str, change: dict) -> None:
    (point,) = copy.deepcopy(list(record["train_info"]["points"].values()))
    assert partitions.is_good(point)
    (point[trial][0] if trial == "lossless" else point[trial]).update(change)
    assert not partitions.is_good(point)


def test_there_are_as_many_models_as_promised() -> None:
    names = {name.split(",")[0] for name in partitions.cases()}
    assert {"gpt2", "llama", "t5"} < names
    assert len(names) >= 13
