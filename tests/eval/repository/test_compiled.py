"""The runner for compiled graphs: its table and its verdict, from invented figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adacc_hf.artifacts.policy import RETAIN
from adacc_hf.compiler import AdaccPartitioner
from adacc_hf.compiler.backend import InstalledPartitioner
from adacc_hf.compiler.compiled_policy import CompiledPolicy, RegionPlan
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.repository import compiled
from adacc_hf.eval.repository.compiled import LowestPeak

REST, PLAIN = 50, 1000


def _step(share: float) -> dict[str, Any]:
    nbytes = int(share * PLAIN)
    return {
        "share": share,
        "predicted_bytes": nbytes,
        "stored_bytes": nbytes,
        "modelled_peak_bytes": nbytes,
        "went_back": False,
        "graph_peak_bytes": REST + nbytes,
        "predicted_peak_bytes": REST + nbytes,
        "peak_bytes": REST + nbytes,
        "overhead_ms": 10.0 * (1 - share),
        "step_ms": 110.0 - 10.0 * share,
    }


class Process:
    """Substitute for the run's processes. `change` is applied to the result of the first family's last budget."""

    def __init__(self, **change: Any) -> None:
        self.change = change

    def __call__(self, function: Any, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if function is compiled.measure_budgets:
            trials = [_step(share) for share in order["shares"]]
            if order["family"] == "gpt2":
                trials[-1].update(self.change)
            return {"status": "measured", "plain": _step(1.0), "trials": trials}
        cache_file = Path(order["cache"], order["name"])
        hits = 2 * cache_file.exists()
        cache_file.touch()
        seconds = 1.0 if hits else 40.0 + 8.0 * (order["name"] == "Adacc at 40 %")
        return {"status": "measured", "cpu_seconds": seconds, "graphs_from_cache": hits, "joint_graphs_from_cache": 0}


def _run(folder: Path, process: Process) -> tuple[int, dict, str]:
    output = folder / "compiled.json"
    status = compiled.main(["--budgets", "6", "--output", str(output)], process)
    return status, json.loads(output.read_text()), output.with_suffix(".md").read_text()


def _cells(table: str, first: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_as_predicted_passes(tmp_path: Path) -> None:
    status, record, table = _run(tmp_path, Process())
    check_record(record)
    assert status == 0
    zero = "+0.0 to +0.0"
    assert _cells(table, "gpt2") == ["gpt2", "6", "6 of 6", "0", "0", zero, zero, "1.00 to 1.08", "1.00 to 1.00"]
    assert "Peaks of gpt2, budgets:" in table
    assert _cells(table, "t5")[1] == "6"
    assert _cells(table, "Adacc at 40 %") == ["Adacc at 40 %", "48.0", "1.20", "1.0", "2", "0"]
    assert (tmp_path / "compiled.svg").read_text().count(">llama<") == 1


def test_other_bytes_than_predicted_fail(tmp_path: Path) -> None:
    status, _, table = _run(tmp_path, Process(stored_bytes=1))
    assert status == 1
    assert _cells(table, "gpt2")[2] == "5 of 6"


def test_a_gpus_blocks_are_no_other_bytes() -> None:
    trials = [{"predicted_bytes": 1000, "stored_bytes": stored_bytes} for stored_bytes in (999, 1000, 1010, 1011)]
    assert compiled.num_as_predicted(trials, "cpu") == 1
    assert compiled.num_as_predicted(trials, "cuda") == 2


def test_a_rising_peak_is_counted(tmp_path: Path) -> None:
    _, _, table = _run(tmp_path, Process(peak_bytes=5000))
    assert _cells(table, "gpt2")[3] == "1"


def test_peaks_that_no_code_shows_are_not_made_up(tmp_path: Path) -> None:
    record = _run(tmp_path, Process())[1]
    point = record["train_info"]["points"]["gpt2, budgets"]
    point["trials"] = [{**trial, "predicted_peak_bytes": None} for trial in point["trials"]]
    assert compiled.peak_errors(point, "predicted_peak_bytes") == []
    assert compiled._budgets_row("gpt2, budgets", point, "cpu")["peak over the code's, %"] == "not known"
    assert compiled._peaks_table(point).count("not known") == 6


def test_shares_fall_at_even_distances() -> None:
    shares = compiled.shares(20)
    assert len(shares) == 20
    assert (shares[0], shares[-1]) == (compiled.MOST, compiled.LEAST)
    assert shares == sorted(shares, reverse=True)
    assert compiled.shares(1) == [compiled.MOST]


@pytest.mark.parametrize("name", compiled.COMPILED)
def test_names_have_a_share_and_actions_or_none(name: str) -> None:
    settings = compiled.COMPILED[name]
    assert settings is None or 0.0 < settings[0] < 1.0


class Partitioner(AdaccPartitioner):
    """Partitioner with a policy, as after compiling and inspecting the code."""

    def compiled(self, share: float | None, peak: int | None, *names: str) -> None:
        code_bytes = None if peak is None else (0, peak)
        plan = RegionPlan(digest="d", code_bytes=code_bytes, stored=tuple((name, RETAIN) for name in names))
        self.policy = CompiledPolicy(share=share, regions=(plan,))

    def inspect_code(self) -> None:
        """Do nothing, because the code counts as inspected."""


@pytest.fixture
def lowest() -> Iterator[LowestPeak]:
    installed = InstalledPartitioner(Partitioner(memory_budget=0.5))
    yield LowestPeak(installed)
    installed.remove()


def _went_back(lowest: LowestPeak, share: float | None, peak: int | None, *names: str) -> bool:
    installed = lowest.installed
    installed.compile_again()
    installed.partitioner.compiled(share, peak, *names)
    installed._num_counted = 1
    lowest.inspect_code()
    return lowest.keep_lowest()


def test_a_smaller_share_never_ends_with_a_higher_peak(lowest: LowestPeak) -> None:
    assert not _went_back(lowest, 0.8, 100, "a", "b", "c")
    assert not _went_back(lowest, 0.6, 80, "a", "b")
    assert _went_back(lowest, 0.5, 90, "a")
    assert lowest.installed.partitioner.policy.share == 0.6
    assert [plan.stored for plan in lowest.installed.partitioner._recorded_plans.values()] == [
        (("a", RETAIN), ("b", RETAIN))
    ]
    assert _went_back(lowest, None, 85)
    # The peak is equal, and nothing is gained.
    assert _went_back(lowest, 0.4, 80, "b")
    assert not _went_back(lowest, 0.3, 70, "b")


def test_a_larger_share_is_no_reason_to_go_back(lowest: LowestPeak) -> None:
    assert not _went_back(lowest, 0.4, 50, "a")
    assert not _went_back(lowest, 0.6, 80, "a", "b")


def test_the_same_plan_and_unknown_peaks_are_left_as_they_are(lowest: LowestPeak) -> None:
    assert not _went_back(lowest, 0.6, 80, "a")
    assert not _went_back(lowest, 0.5, 90, "a")
    assert not _went_back(lowest, 0.4, None)
