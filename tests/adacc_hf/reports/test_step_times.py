"""Section of the report on a run's first steps."""

from __future__ import annotations

import pytest

from adacc_hf.adapt.events import CHECKING, FOLLOWING, MEASURING, RECORD_KEYS
from adacc_hf.artifacts.tables import table
from adacc_hf.reports import step_times
from adacc_hf.reports.step_times import draw_first_steps, first_steps_parts, part_seconds

PNG = b"\x89PNG"


def record(step, activity=FOLLOWING, seconds=0.25, profiling=0.0, solving=0.0, events=()):
    values = (step, activity, seconds, profiling, solving, list(events))
    names = ("step", "activity", "seconds", "profiling_s", "solving_s", "events")
    assert set(names) == RECORD_KEYS
    return dict(zip(names, values, strict=True))


RECORDS = [
    record(1, CHECKING, 5.0, 4.0, 0.5, ["policy"]),
    record(2, MEASURING, 0.5, 0.0, 0.25, ["change", "change"]),
    record(3),
]


def test_the_section_has_the_seconds_of_each_step():
    pytest.importorskip("matplotlib")
    _, paragraph, figure, rows = first_steps_parts(RECORDS)
    assert figure.png.startswith(PNG)
    assert "first 3 steps took 5.75 s: 4.00 s of profiling, 0.75 s of solving" in paragraph
    cells = [
        ("1", CHECKING, "5.00", "4.00", "0.50", "policy set"),
        ("2", MEASURING, "0.50", "0.00", "0.25", "policy changed"),
        ("3", FOLLOWING, "0.25", "0.00", "0.00", ""),
    ]
    assert rows.endswith(table(cells[0], cells[1:]).split("\n", 2)[2])
    assert "| 1 | " + " | ".join(cells[0][1:]) + " |" in rows


def test_the_parts_of_a_step_add_up_to_its_time():
    assert part_seconds(RECORDS[0]) == {"profiling_s": 4.0, "solving_s": 0.5, "training_s": 0.5}


def test_bars_have_the_parts_side_by_side_and_labels_are_inside_the_picture(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(step_times, "to_png", lambda figure: figures.append(figure) or PNG)
    draw_first_steps(RECORDS)
    (figure,) = figures
    (axis,) = figure.axes
    profiling, solving, training = ([(bar.get_x(), bar.get_width()) for bar in bars] for bars in axis.containers)
    assert (profiling[0], solving[0], training[0]) == ((0.0, 4.0), (4.0, 0.5), (4.5, 0.5))
    figure.draw_without_rendering()
    assert [text.get_text() for text in axis.texts] == ["5.00 s, policy set", "0.50 s, policy changed", "0.25 s"]
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in axis.texts)
    assert [label.get_text() for label in axis.get_yticklabels()][1] == f"2: {MEASURING}"
