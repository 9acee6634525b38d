"""The timeline of a run as a picture."""

from __future__ import annotations

import pytest

from adacc_hf.reports.document import Figure
from adacc_hf.reports.timeline import MAX_CURVES, outlier_curves, timeline_parts

PNG = b"\x89PNG"


def history(steps=(1, 2, 4, 8)):
    tracked = [
        {
            "step": step,
            "event": "tracking",
            "num_outliers": {f"Block.mlp.{n}#{n}": n * step for n in range(12)},
            "errors": {"Block.mlp.0#0": 0.1},
            "gradient_error": 0.2,
            "step_ms": 10.0,
            "predicted_step_ms": 11.0,
        }
        for step in steps
    ]
    changed = {"step": 5, "event": "change", "reason": "less", "peak_bytes": 2**20, "predicted_step_ms": 9.0}
    measured = {"step": 6, "event": "memory", "peak_bytes": 2**20, "measured_peak_bytes": 2**20 + 7}
    return [{"step": 0, "event": "policy", "peak_bytes": 2**21}, *tracked, changed, measured]


@pytest.mark.parametrize("steps", [(1, 2, 4, 8), (1, 64, 4096)], ids=["short", "long"])
def test_it_is_drawn(steps):
    pytest.importorskip("matplotlib")
    (figure,) = [part for part in timeline_parts(history(steps)) if isinstance(part, Figure)]
    assert figure.png.startswith(PNG)


def test_the_activations_that_move_most_are_shown():
    curves = outlier_curves([record for record in history() if record["event"] == "tracking"])
    assert list(curves) == [f"Block.mlp.{n}#{n}" for n in range(11, 11 - MAX_CURVES, -1)]
    assert curves["Block.mlp.11#11"] == [(1, 11.0), (2, 22.0), (4, 44.0), (8, 88.0)]
