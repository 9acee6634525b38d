"""The share of a run that following the data takes, from a tiny run and from times that the test makes up."""

from __future__ import annotations

import json
import math

import pytest

from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.tracking_cost import FOLLOW_UPS, figures, main
from adacc_hf.eval.trials.workload import Workload

TINY = Workload(width=32, layers=2, heads=2, batch=1, tokens=32)


def test_a_run_is_a_line_and_the_record_is_valid(tmp_path, capsys):
    output = tmp_path / "tracking_cost.json"
    options = ["--steps", "40", "--batches", "2", "--output", str(output)]
    assert main(options, TINY) == 0
    assert main([*options, "--resume"], TINY) == 0, "nothing is measured again"
    record = json.loads(output.read_text())
    check_record(record)
    point = record["train_info"]["points"]["batch 2"]
    # The policy is set after two steps; 1, 2, 4, 8, 16 and 32 steps later is tracked.
    assert (point["steps"], point["events"]["tracking"]) == (38, 6)
    assert 0 < point["logged_share"] < 1
    assert output.with_suffix(".md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("drift", [0.0, 0.01], ids=["steady", "slowing-down"])
def test_what_steps_take_longer_than_those_around_them_is_found(drift):
    """A step with an event takes 30 ms more, the one after it 5 ms, on a machine that may slow down. The 24th, 48th and
    96th step are recorded, 40 ms each, as are the first two."""
    normal = [10.0 + drift * number for number in range(200)]
    events = [{"step": step, "event": "tracking"} for step in (22, 60, 140)]
    extra = {21: 30.0, 22: 5.0, 59: 30.0, 60: 5.0, 139: 30.0, 140: 5.0}
    extra = {index: extra.get(index, 0.0) + 40.0 * (index - 19 in (1, 2, 24, 48, 96)) for index in range(200)}
    times = [(ms + extra.get(index, 0.0), 2 * ms) for index, ms in enumerate(normal)]
    found = figures([{"step": 20, "event": "policy"}, *events], times, logged_ms=90.0, first_ms=80.0)
    assert found["steps"] == 180
    assert found["events"] == {"tracking": 3}
    # The steps around one that is touched are as many on either side, but for the first, which has none on its left.
    assert math.isclose(found["extra_ms"], 105.0, abs_tol=3 * (FOLLOW_UPS + 1) * 9 * drift)
    assert math.isclose(found["recorded_ms"], 200.0, abs_tol=3 * drift)
    assert found["measured_share"] == found["extra_ms"] / found["total_ms"]
    assert found["logged_share"] == 90.0 / sum(2 * ms for ms in normal[20:])


def test_runs_too_short_to_compare_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--steps=31 must be 32 or more"):
        main(["--steps", "31", "--output", str(tmp_path / "x.json")], TINY)
