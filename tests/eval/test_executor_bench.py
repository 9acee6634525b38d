"""The executor's benchmark on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adacc_hf.eval import executor_bench
from adacc_hf.eval.executor_bench import (
    NUM_LENGTHS,
    NUM_STEADY_STEPS,
    RECOMPUTED,
    RETAINED,
    case_name,
    new_length_figures,
)
from adacc_hf.eval.trials.contenders import CHECKPOINTING, PLAIN
from adacc_hf.eval.trials.families import FAMILIES
from adacc_hf.eval.trials.workload import Workload


def run(tiny: Workload, output: Path) -> int:
    return executor_bench.main(["--rounds", "2", "--notes", "test", "--output", str(output)], {tiny: 99})


def test_record_and_table(tiny: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, tmp_path / "bench.json") == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["run_info"]["cases"][0]["rounds"] == 2
    assert record["run_info"]["clock"] == "wall"
    figures = record["train_info"]["points"][case_name(tiny)]["methods"]
    assert list(figures) == [PLAIN, CHECKPOINTING, RECOMPUTED, RETAINED]
    for row in figures.values():
        assert row["of_plain"] == row["step_ms"]["median"] / figures[PLAIN]["step_ms"]["median"]
        assert row["of_checkpointing"] == row["step_ms"]["median"] / figures[CHECKPOINTING]["step_ms"]["median"]
        assert row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]
        overhead = row["step_ms"]["median"] - figures[PLAIN]["step_ms"]["median"]
        assert row["overhead_per_block_ms"] == overhead / tiny.layers
        assert row["peak_of_checkpointing"] == row["peak_bytes"] / figures[CHECKPOINTING]["peak_bytes"]
    assert figures[RETAINED]["stored_bytes"] == figures[PLAIN]["stored_bytes"]
    assert figures[RECOMPUTED]["stored_bytes"] < figures[PLAIN]["stored_bytes"] / 2
    printed = capsys.readouterr().out
    assert all(f"| {name}" in printed for name in [*figures, case_name(tiny)])


def test_every_family_is_timed_in_both_cases() -> None:
    families = [workload.family for workload in executor_bench.CASES]
    assert sorted(families) == sorted([*FAMILIES] * 2)


def test_nothing_is_timed_on_wrong_gradients(
    tiny: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = executor_bench.build_contenders

    def with_an_error(*arguments):
        built = build(*arguments)
        built[2].model.transformer.h[1].ln_1.bias.register_hook(lambda gradient: gradient * 1.001)
        return built

    monkeypatch.setattr(executor_bench, "build_contenders", with_an_error)
    monkeypatch.setattr(executor_bench, "time_rounds", lambda *_: pytest.fail("timed on a red gate"))
    assert run(tiny, tmp_path / "bench.json") == 1
    assert re.search(r"everything recomputed, .*: transformer\.h\.1\.ln_1\.bias differs", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("checkpointing_ms", "steps"), [(12.0, 25), (10.5, 100), (10.0, None), (9.0, None)])
def test_extra_time_is_made_up_for_by_quicker_steps(checkpointing_ms: float, steps: int | None) -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    contender = SimpleNamespace(batch={"input_ids": ids, "labels": ids})
    lengths: list[int] = []

    def step_ms() -> float:
        length = contender.batch["labels"].shape[1]
        lengths.append(length)
        return {1: 40.0, 2: 30.0}.get(lengths.count(length), 10.0)

    figures = new_length_figures(contender, checkpointing_ms, step_ms)
    assert (figures["first_ms"], figures["second_ms"], figures["steady_ms"]) == (40.0, 30.0, 10.0)
    assert figures["extra_ms"] == 50.0
    assert figures["amortised_after"] == steps
    assert lengths == [length for length in range(11, 16) for _ in range(2 + NUM_STEADY_STEPS)]
    assert len(set(lengths)) == NUM_LENGTHS
    assert contender.batch["input_ids"] is ids
