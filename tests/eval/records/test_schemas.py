"""Every committed record matches its schema, and the schemas reject invalid records."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from adacc_hf.eval import loss
from adacc_hf.eval.records.ledger import RecordError
from adacc_hf.eval.records.schemas import check_record

RECORDS = sorted((Path(__file__).parents[3] / "eval" / "results").rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=[f"{path.parent.name}/{path.stem}" for path in RECORDS])
def test_committed_records_are_valid(path: Path) -> None:
    check_record(json.loads(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a record in which all points but one were measured."""

    def invented_point(function, order: dict, timeout_s: float | None) -> dict:
        if order["method"] == "full":
            return {"status": "error", "reason": "broken"}
        return {"status": "measured", "curve": [(1, 2.0)], "training_curve": [(1, 2.0)]}

    output = tmp_path_factory.mktemp("schemas") / "loss.json"
    loss.main(["--methods", "none", "full", "adacc", "--output", str(output)], invented_point)
    return json.loads(output.read_text())


def test_a_fresh_record_is_valid(record: dict[str, Any]) -> None:
    check_record(record)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("meta_info", "status"), "running"),
        (("meta_info", "commit"), "dirty"),
        (("run_info", "seed"), "zero"),
        (("train_info", "points"), {}),
        (("train_info", "points", "none", "curve"), [[1]]),
        (("train_info", "points", "none", "status"), "error"),
        (("train_info", "points", "full", "reason"), None),
        (("train_info", "points", "full", "status"), "measured"),
        (("train_info", "points", "none", "peak_bytes"), 0.5),
        (("train_info", "points", "none", "step_ms"), {"low": 1.0}),
        (("more",), 1),
        (("train_info", "gap_to_plain", "adacc", "final_percent"), "small"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_wrong_is_noticed(record: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    broken = copy.deepcopy(record)
    *parents, name = place
    part = broken
    for parent in parents:
        part = part[parent]
    part[name] = value
    with pytest.raises(RecordError):
        check_record(broken)
