"""What evolution gains, on a tiny model."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from adacc_hf import Policy
from adacc_hf.adapt import judging
from adacc_hf.eval import evolution
from adacc_hf.eval.records.records import Spread
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.trials import evolution_case
from adacc_hf.eval.trials.evolution_scenarios import SCENARIOS, plant
from adacc_hf.eval.trials.workload import Workload

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


def test_the_error_of_a_median_is_that_of_normal_samples_and_outliers_do_not_move_it() -> None:
    normal = statistics.NormalDist(5.0, 2.0)
    samples = [normal.inv_cdf((place + 0.5) / 400) for place in range(400)]
    expected = 1.2533 * 2.0 / 20
    assert evolution_case.median_error(samples) == pytest.approx(expected, rel=0.01)
    assert evolution_case.median_error([*samples, 1e9]) == pytest.approx(expected, rel=0.02)
    assert evolution_case.median_error([3.0]) == 0.0


def test_changes_are_timed_until_the_noise_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that differ by chance are added until their median is known, or there are enough of them."""
    draws = random.Random(0)

    class Noisy:
        noise_ms = 1.0
        rounds = 0

        def timed(self, handle, plans, rounds):
            self.rounds += rounds
            before = [100.0] * rounds
            return {"before": before, "after": [103.0 + draws.gauss(0, self.noise_ms) for _ in before]}

    measured = []
    for noise_ms in (0.1, 4.0, 100.0):
        case = Noisy()
        case.noise_ms = noise_ms
        evolving = evolution_case.Evolving(case, None, None)
        before_ms, longer_ms = evolving._times(None, None)
        assert before_ms == 100.0
        measured.append((case.rounds, abs(longer_ms - 3.0)))
    (few, _), (more, error), (most, _) = measured
    assert few == evolution_case.CHANGE_ROUNDS < more < most == evolution_case.MOST_ROUNDS
    assert error < 3.0, "three standard errors of a percent"


def test_planting_makes_that_share_of_channels_outliers() -> None:
    model = SCENARIOS["constructed"].model(TINY, "cpu", 0)
    for share, channels in ((0.19, (12, 12, 389)), (0.0, (0, 0, 0))):
        plant(model, share)
        for block in model.transformer.h:
            biases = (block.ln_1.bias, block.ln_2.bias, block.mlp.c_fc.bias)
            assert tuple(int(bias.count_nonzero()) for bias in biases) == channels
