"""Section of a report on the first steps of a run: the time of each step, and the work that training waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adacc_hf.adapt.events import EVENTS
from adacc_hf.artifacts.tables import table
from adacc_hf.reports.document import Figure, Part
from adacc_hf.reports.plots import FONT, new_figure, plot_module, to_png

Record = Mapping[str, Any]
"""Record of a step in `FirstSteps.records`."""

PARTS = {
    "profiling_s": ("profiling", "#E69F00"),
    "solving_s": ("solving, or waiting for the solver", "#CC79A7"),
    "training_s": ("training", "#0072B2"),
}
"""Label and colour of each part of a step's bar, by the name of the part's time, from left to right."""
ROW_INCHES = 0.3
LABEL_SHARE = 1.18
"""Upper end of the time axis, as a multiple of the longest step. The margin leaves room for the seconds, which are
written next to each bar."""
HEADERS = ("step", "ran under", "seconds", "profiling", "solving", "then")


def first_steps_parts(records: Sequence[Record]) -> list[Part]:
    """Return the report's section on the first steps, or [] if `records` is empty."""
    if not records:
        return []
    profiling, solving, total = (sum(r[name] for r in records) for name in ("profiling_s", "solving_s", "seconds"))
    steps = "step" if len(records) == 1 else f"{len(records)} steps"
    rows = [
        (
            str(record["step"]),
            record["activity"],
            f"{record['seconds']:.2f}",
            f"{record['profiling_s']:.2f}",
            f"{record['solving_s']:.2f}",
            _step_events(record),
        )
        for record in records
    ]
    return [
        "## The first steps",
        (
            f"The first {steps} took {total:.2f} s: {profiling:.2f} s of profiling, {solving:.2f} s of "
            "solving for policies and waiting for the solver, and the rest of training. Loading data, evaluation and "
            "saving between the steps are not counted."
        ),
        Figure("first_steps.png", "Seconds of each of the first steps", draw_first_steps(records)),
        table(HEADERS, rows, ("step", "seconds", "profiling", "solving")),
    ]


def draw_first_steps(records: Sequence[Record]) -> bytes:
    """Draw one bar of seconds per step, divided into profiling, solving and training. Return PNG bytes."""
    with plot_module("matplotlib").rc_context(FONT):
        figure = new_figure(ROW_INCHES * len(records) + 1.0)
        axis = figure.subplots()
        rows = range(len(records))
        starts = [0.0] * len(records)
        for name, (label, color) in PARTS.items():
            widths = [part_seconds(record)[name] for record in records]
            axis.barh(rows, widths, left=starts, height=0.7, color=color, label=label)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        longest = max(starts) or 1.0
        for row, (record, end) in enumerate(zip(records, starts, strict=True)):
            text = f"{record['seconds']:.2f} s"
            axis.text(
                end + 0.006 * longest, row, f"{text}, {_step_events(record)}" if record["events"] else text, va="center"
            )
        axis.set_yticks(rows, [f"{record['step']}: {record['activity']}" for record in records])
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        axis.set_xlim(0, LABEL_SHARE * longest)
        axis.set_xlabel("seconds")
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=len(PARTS), frameon=False)
        return to_png(figure)


def part_seconds(record: Record) -> dict[str, float]:
    """Return the seconds of a step's parts, keyed by the names in `PARTS`. The sum of the parts is the step's time."""
    profiling, solving = record["profiling_s"], record["solving_s"]
    return {
        "profiling_s": profiling,
        "solving_s": solving,
        "training_s": max(0.0, record["seconds"] - profiling - solving),
    }


def _step_events(record: Record) -> str:
    return ", ".join(dict.fromkeys(EVENTS.get(event, event) for event in record["events"]))
