"""The longest sequence of every method: its prediction, its counted bytes, and the table of results."""

import json
from pathlib import Path

import pytest

from adacc_hf.eval import longest

POINT = {"status": "measured", "peak_bytes": 2**20, "ms_per_1000_tokens": {"median": 5, "low": 4, "high": 6}}


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict peaks of 100 bytes a token, with a divisor for each method, in place of a profile."""
    divisors = dict(zip(longest.METHODS, (1, 2, 4, 8, 2, 16), strict=True))
    monkeypatch.setattr(longest, "LongTraining", lambda *args: Stub())
    monkeypatch.setattr(longest, "joined", lambda profiles: None)
    monkeypatch.setattr(longest, "peak_at", lambda profile, method, tokens: 100 * tokens // divisors[method])


class Stub:
    def profile(self, tokens: int) -> None:
        """Measure nothing."""


def run_main(tmp_path: Path, run, *options: str) -> tuple[int, dict, str]:
    output = tmp_path / "longest.json"
    status = longest.main(["--models", "llama", "--limit", "100000", "--output", str(output), *options], run)
    return status, json.loads(output.read_text())["train_info"], output.with_suffix(".md").read_text()


def test_each_method_is_measured_at_its_longest_and_at_a_common_length(tmp_path: Path, predictions: None) -> None:
    orders = []

    def run(function, order: dict, timeout_s: float) -> dict:
        orders.append((order["method"], order["tokens"]))
        return POINT

    status, record, table = run_main(tmp_path, run)
    assert status == 0
    expected = {"plain": 960, "checkpointing": 1984, "chunked": 3968, "tiled": 8000, "exact": 1984, "adacc": 16000}
    assert record["longest"] == {"llama": expected}
    assert orders == [*expected.items(), ("tiled", 3968), ("adacc", 3968)]
    row = next(line for line in table.splitlines() if line.startswith("| Adacc  "))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["16,000", "4.03", "1.00 MiB"]
    assert (tmp_path / "longest.svg").exists()


def test_a_shorter_length_is_tried_if_counted_bytes_exceed_the_limit(tmp_path: Path, predictions: None) -> None:
    def run(function, order: dict, timeout_s: float) -> dict:
        return POINT if order["tokens"] <= 3840 else {"status": "out_of_memory", "reason": "the step takes more"}

    status, record, _ = run_main(tmp_path, run, "--methods", "chunked")
    assert (status, record["longest"]) == (0, {"llama": {"chunked": 3840}})


def test_a_method_without_a_fitting_length_is_listed_with_its_reason(tmp_path: Path, predictions: None) -> None:
    def run(function, order: dict, timeout_s: float) -> dict:
        return {"status": "error", "reason": "no reason given"}

    status, record, table = run_main(tmp_path, run, "--methods", "plain")
    assert (status, record["longest"]) == (1, {"llama": {"plain": 0}})
    assert "no reason given" in table
