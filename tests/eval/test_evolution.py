"""What evolution gains, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf import Policy, judging
from adacc_hf.eval import evolution, evolution_case
from adacc_hf.eval.evolution_scenarios import SCENARIOS, plant
from adacc_hf.eval.records import Spread
from adacc_hf.eval.schemas import check_record
from adacc_hf.eval.workload import Workload

TINY = Workload(width=64, layers=2, heads=2, batch=1, tokens=32)


def test_outliers_come_and_go_and_the_policy_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for module in (evolution_case, judging):  # not the solver, whose choice depends on the prices of the day
        monkeypatch.setattr(module, "solve_policy", lambda profile, *_, **__: Policy.uniform(profile, "compress"))
    for name in ("CHANGE_ROUNDS", "MOST_ROUNDS"):  # times are not looked at
        monkeypatch.setattr(evolution_case, name, 1)
    output = tmp_path / "evolution.json"
    options = ["--steps", "20", "--rounds", "2", "--batches", "4", "--budget", "1.0", "--output", str(output)]
    assert evolution.main(options, TINY) == 0
    record = json.loads(output.read_text())
    check_record(record)
    points = record["train_info"]["points"]
    assert list(points) == ["stdlib text, batch 4", "constructed, batch 4"]
    found = points["constructed, batch 4"]
    counts = dict(found["outliers"])
    assert list(counts) == [1, 2, 4, 8, 16]
    # Planted until step 1 and from step 7 to 12, in both norms and c_fc.
    assert counts[8] > max(counts[4], counts[16])
    assert found["changes"]
    for change in found["changes"]:
        assert change["reason"]
        # As in test_memory.py: scalars that the profiler does not see, in a model of half a megabyte.
        assert change["measured_peak_bytes"] == pytest.approx(change["predicted_peak_bytes"], rel=0.01)
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out
    for name in ("evolution.svg", "evolution_outliers.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")


def test_the_predicted_gain_is_the_ratio_of_steps_with_either_overhead() -> None:
    class Figures:
        evolving_step_ms = Spread.of([50.0])
        frozen_overhead_ms, evolving_overhead_ms = 12.0, 2.0

    assert evolution.predicted_gain(Figures) == pytest.approx(60 / 50)


def test_planting_makes_that_share_of_channels_outliers() -> None:
    model = SCENARIOS["constructed"].model(TINY, "cpu", 0)
    for share, channels in ((0.19, (12, 12, 389)), (0.0, (0, 0, 0))):
        plant(model, share)
        for block in model.transformer.h:
            biases = (block.ln_1.bias, block.ln_2.bias, block.mlp.c_fc.bias)
            assert tuple(int(bias.count_nonzero()) for bias in biases) == channels
