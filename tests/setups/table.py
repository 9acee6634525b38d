"""Figures of one run under a budget against plain training and torch's checkpointing, as a row of a Markdown table."""

from statistics import median
from typing import Any

HEADINGS = (
    "set-up",
    "budget",
    "plain MiB",
    "checkpoint MiB",
    "budget MiB",
    "worst peak over budget (steps over)",
    "losses equal",
    "time / plain",
    "time / checkpoint",
    "second half / checkpoint",
    "plain steps until policy is final",
    "events (step: event)",
)
TOLERANCE = 0.005
"""Excess over the budget, as a share of the budget, above which a step is listed."""
Run = dict[str, Any]


def figures(plain: Run, checkpoint: Run, run: Run, budget: int) -> dict[str, Any]:
    """Return what the table shows of `run`, with numbers unrounded."""
    excess = [peak / budget - 1 for peak in run["peaks"]]
    warnings = [message["step"] for message in run["log"] if message["level"] in ("WARNING", "ERROR")]
    over = [step for step, share in enumerate(excess, 1) if share > TOLERANCE]
    last_change = max((event["seen"] for event in run["history"] if changes_policy(event)), default=0)
    count = len(run["seconds"])
    half = count // 2
    return {
        "worst_excess": max(excess),
        "steps_over": {step: excess[step - 1] for step in over},
        "warned": {step: any(warning <= step for warning in warnings) for step in over},
        "first_difference": first_difference(plain, run),
        "time_over_plain": sum(run["seconds"]) / sum(plain["seconds"][:count]),
        "time_over_checkpoint": sum(run["seconds"]) / sum(checkpoint["seconds"][:count]),
        "second_half_over_checkpoint": sum(run["seconds"][half:]) / sum(checkpoint["seconds"][half:count]),
        "last_change": last_change,
        "plain_steps_until_final": (sum(run["seconds"][:last_change]) - sum(plain["seconds"][:last_change]))
        / median(plain["seconds"]),
        "events": [(event["seen"], event["event"], event.get("reason") or "") for event in run["history"]],
    }


def changes_policy(event: dict[str, Any]) -> bool:
    """Return True if a policy was added or replaced by this event."""
    return event["event"] in ("policy", "change") or bool(event.get("corrected"))


def first_difference(plain: Run, run: Run) -> str | None:
    """Return the first step whose loss or gradient norm differs from plain's, "weights", or None if nothing differs."""
    for step, (expected, actual) in enumerate(zip(plain["losses"], run["losses"], strict=False), 1):
        if expected != actual:
            return str(step)
    return "weights" if run["error"] is None and run["weights"] != plain["weights"] else None


def cells(name: str, fraction: float, plain: Run, checkpoint: Run, run: Run, budget: int) -> list[str]:
    """Return the cells of a row."""
    memory = [f"{max(plain['peaks']) / 2**20:.1f}", f"{max(checkpoint['peaks']) / 2**20:.1f}", f"{budget / 2**20:.1f}"]
    begin = [name, f"{fraction:g}", *memory]
    if run["error"] is not None:
        step = len(run["peaks"])
        return [
            *begin,
            f"FAILED in step {step}: {run['error'].splitlines()[0].partition(', reached in')[0]}",
            *[""] * (len(HEADINGS) - 6),
        ]
    values = figures(plain, checkpoint, run, budget)
    equal = "yes" if values["first_difference"] is None else f"no, from {values['first_difference']}"
    times = ("time_over_plain", "time_over_checkpoint", "second_half_over_checkpoint")
    return [
        *begin,
        excess_cell(values),
        equal,
        *(f"{values[time]:.2f}" for time in times),
        f"{values['plain_steps_until_final']:.1f} (step {values['last_change']})",
        ", ".join(f"{step}: {event}" for step, event, _ in values["events"]),
    ]


def excess_cell(values: dict[str, Any]) -> str:
    """Return the worst excess in percent, the steps over the budget, and for how many a warning had been emitted."""
    cell = f"{100 * values['worst_excess']:+.1f} %"
    warned = [step for step, has_warning in values["warned"].items() if has_warning]
    silent = [step for step, has_warning in values["warned"].items() if not has_warning]
    parts = [f"{word}: {ranges(steps)}" for word, steps in (("warned", warned), ("no warning", silent)) if steps]
    return f"{cell} ({'; '.join(parts)})" if parts else cell


def ranges(steps: list[int]) -> str:
    """Return steps as text, such as "1, 4-30"."""
    text: list[str] = []
    for index, step in enumerate(steps):
        if index and steps[index - 1] == step - 1:
            text[-1] = f"{text[-1].partition('-')[0]}-{step}"
        else:
            text.append(str(step))
    return ", ".join(text)


def line(row: list[str] | tuple[str, ...]) -> str:
    """Return a row in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def heading() -> str:
    """Return the table's first two lines."""
    return f"{line(HEADINGS)}\n{line(['---'] * len(HEADINGS))}"
