"""The bench of memory budgets on a tiny model."""

from __future__ import annotations

import json

import pytest

from adacc_hf.eval import budget_bench
from adacc_hf.eval.trials.contenders import CHECKPOINTING, PLAIN
from adacc_hf.eval.trials.workload import Workload
from adacc_hf.torch_glue.memory import StepMemory


@pytest.fixture(scope="module")
def tiny() -> Workload:
    """Long enough that attention's inputs and the MLP weigh more than the head, as in a real model."""
    return Workload(width=64, layers=3, heads=2, batch=4, tokens=128)


@pytest.fixture(scope="module")
def record(tiny: Workload, tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    assert budget_bench.main(["--rounds", "2", "--output", str(path)], tiny) == 0
    (point,) = json.loads(path.read_text())["train_info"]["points"].values()
    return point


def test_every_budget_is_met_or_refused(record: dict) -> None:
    methods, skipped = record["methods"], record["skipped"]
    budgets = ("50% of plain", "25% of plain", "checkpointing's peak")
    wanted = {f"{mode}, {budget}" for mode in ("Adacc", "Adacc lossless") for budget in budgets}
    assert methods.keys() | skipped.keys() == {PLAIN, CHECKPOINTING} | wanted
    assert not methods.keys() & skipped.keys()
    assert {"Adacc, 50% of plain", "Adacc lossless, 50% of plain"} <= methods.keys()


def test_measured_bytes_keep_to_the_budget(record: dict) -> None:
    methods = record["methods"]
    bounded = {name: row for name, row in methods.items() if "budget" in row}
    for name, row in bounded.items():
        assert row["stored_bytes"] == row["predicted_stored_bytes"], name
        used = row["peak_bytes"] if row["budget"]["of"] == "peak" else row["stored_bytes"]
        assert row["within_budget"] == (used <= row["budget"]["nbytes"]), name
        if row["budget"]["of"] == "stored":
            assert row["within_budget"], name
    half = methods["Adacc, 50% of plain"]["budget"]["nbytes"]
    assert half == methods[PLAIN]["stored_bytes"] // 2


def test_lossless_methods_have_no_error(record: dict) -> None:
    methods = record["methods"]
    errors = {name: row["gradient_error"] for name, row in methods.items()}
    lossless = [error for name, error in errors.items() if "lossless" in name or name in (PLAIN, CHECKPOINTING)]
    assert lossless == [0.0] * len(lossless)
    assert max(errors.values()) < 0.5


def test_ratios_are_of_medians(record: dict) -> None:
    methods = record["methods"]
    for row in methods.values():
        assert row["of_plain"] == row["step_ms"]["median"] / methods[PLAIN]["step_ms"]["median"]
        assert row["of_checkpointing"] == row["step_ms"]["median"] / methods[CHECKPOINTING]["step_ms"]["median"]


def test_budget_bounds_what_its_form_says() -> None:
    memory = StepMemory(static_bytes=10, stored_bytes=100, peak_bytes=200, timeline=())
    assert budget_bench.Budget(title="", given=0.5, nbytes=100).holds(memory)
    assert not budget_bench.Budget(title="", given=0.5, nbytes=99).holds(memory)
    assert budget_bench.Budget(title="", given=200, nbytes=200).holds(memory)
    assert not budget_bench.Budget(title="", given=199, nbytes=199).holds(memory)


def test_infeasible_budgets_are_listed_with_the_reason(tiny: Workload) -> None:
    model, batch = tiny.model(), next(tiny.batches())
    entries, skipped = budget_bench.within_budgets(model, batch, checkpointing_peak_bytes=1)
    assert set(skipped) == {"Adacc, checkpointing's peak", "Adacc lossless, checkpointing's peak"}
    assert all("below the least possible peak" in reason for reason in skipped.values())
    assert entries
