"""The search for the largest batch of every method, and the table of its results."""

import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.eval import max_batch
from adacc_hf.eval.max_batch import MAX_GUESSES, BatchTrial, largest
from adacc_hf.eval.trials.isolation import run_here

FITTING = {"none": 8, "full": 61, "quantization": 19, "adacc": 61, "adacc_no_outlier": 0}


def paper_point(function, order: dict, timeout_s: float) -> dict:
    """Return points like the paper's for GPT-345M."""
    batch = order["subject"]["batch"]
    assert order["gate"] is False
    fits = batch <= FITTING[order["method"]]
    return {"status": "measured" if fits else "out_of_memory", "peak_bytes": batch * 2**20, "reason": ""}


def test_the_papers_table_stands_beside_ours(tmp_path: Path) -> None:
    output = tmp_path / "max_batch.json"
    argv = ["--preset", "gpt2-345m", "--limit", "32GiB", "--output", str(output)]
    assert max_batch.main(argv, paper_point) == 0
    record = json.loads(output.read_text())
    assert record["train_info"]["max_batch"] == FITTING
    assert record["run_info"]["limit_bytes"] == 32 * 2**30
    table = output.with_suffix(".md").read_text()
    row = next(line for line in table.splitlines() if line.startswith("| HF gradient checkpointing"))
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["61", "61.00 MiB", "7.62", "61 (7.62x)"]


def test_what_ends_for_another_reason_is_told(tmp_path: Path) -> None:
    def failing(function, order: dict, timeout_s: float) -> dict:
        return {"status": "timeout", "reason": "no result after 1 s"}

    output = tmp_path / "max_batch.json"
    assert max_batch.main(["--methods", "none", "--output", str(output)], failing) == 1
    assert "none, batch 1: no result after 1 s" in output.with_suffix(".md").read_text()


def test_a_tiny_model_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "max_batch.json"
    argv = ["--tokens", "16", "--methods", "none", "--most", "2", "--limit", "1GiB", "--output", str(output)]
    assert max_batch.main(argv, run_here) == 0
    record = json.loads(output.read_text())
    assert record["train_info"]["max_batch"] == {"none": 2}
    peaks = [point["peak_bytes"] for point in record["train_info"]["points"].values()]
    assert peaks[0] < peaks[1] < 2**30


LIMIT, STATIC = 1000, 200

Peaks = Callable[[int], int | None]


def search(fitting: int, most: int, first: int, peaks: Peaks) -> tuple[int, list[int]]:
    """Return the result of a search in which `fitting` is the largest batch, and the batches that the search tried."""
    tried_batches: list[int] = []

    def trial(batch: int) -> BatchTrial:
        tried_batches.append(batch)
        return BatchTrial(batch, batch <= fitting, STATIC, peaks(batch))

    return largest(trial, LIMIT, most, first), tried_batches


@given(
    fitting=st.integers(0, 300),
    most=st.integers(1, 300),
    first=st.integers(1, 400),
    peaks=st.lists(st.none() | st.integers(0, 3000), min_size=301, max_size=301),
)
def test_it_finds_the_largest_whatever_the_bytes(fitting: int, most: int, first: int, peaks: list[int | None]) -> None:
    largest_batch, tried_batches = search(fitting, most, first, peaks.__getitem__)
    assert largest_batch == min(fitting, most)
    assert len(tried_batches) == len(set(tried_batches)) <= MAX_GUESSES + 2 * most.bit_length() + 1
    assert all(1 <= batch <= most for batch in tried_batches)
