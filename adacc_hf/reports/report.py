"""Report of a run as Markdown and as one HTML page: the policy, its reasons, and its effect on memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adacc_hf.adapt.history import describe_fallbacks
from adacc_hf.artifacts.memory_simulator import plain_blocks_ms, simulate
from adacc_hf.artifacts.plans import plain_plan
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.tables import table
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.reports.document import Figure, Part, Report
from adacc_hf.reports.explain import (
    HEADERS,
    check_belongs,
    describe_head,
    describe_host,
    describe_plans,
)
from adacc_hf.reports.plots import draw_memory, draw_policy_map, draw_timeline
from adacc_hf.solve.simple_policies import uniform_policy

if TYPE_CHECKING:
    from adacc_hf.artifacts.memory_simulator import Outcome

Record = dict[str, Any]
"""Event of a run, as a dict. Numbers whose names end in `_bytes` or `_ms` are in bytes or milliseconds."""

TITLE = "Adacc report"


def policy_report(
    *,
    profile: Profile,
    policy: Policy,
    history: Sequence[Record] = (),
) -> Report:
    """Return the report of a policy, with text, tables and pictures.

    Args:
        profile: profile that the policy was solved from.
        history: events of a run, from `AdaccCallback.history`. Each event is a record with `step` and `event`.
            Outliers, errors, step times and peaks are drawn in timeline.png.

    Raises PolicyMismatchError if policy and profile do not belong together, and ImportError if matplotlib is not
    installed.
    """
    check_belongs(policy, profile)
    outcomes = _simulated_steps(profile, policy)
    figures = [
        Figure("policy_map.png", "Action of every activation in every block", draw_policy_map(profile, policy)),
        Figure("memory.png", "Live memory over one training step", _memory_png(profile, policy, outcomes)),
    ]
    parts = (
        *_summary_section(profile, policy, outcomes),
        f"Available on {profile.device}: {format_bytes(profile.available_bytes)}.",
        "## Policy map",
        ("The colour is the action on an activation between forward and backward. The bytes are on the right."),
        figures[0],
        "## Memory over a step",
        "Every block has the same width, so the axis shows the order of events and not time.",
        figures[1],
        *fallback_parts(history),
        *timeline_parts(history),
        *_actions_section(profile, policy),
        *event_parts(history),
    )
    return Report(title=TITLE, parts=parts)


def _simulated_steps(profile: Profile, policy: Policy) -> dict[str, Outcome]:
    full = uniform_policy(profile, Action.RECOMPUTE)
    plans = {
        "plain": (profile, [plain_plan(profile.kind_of(block)) for block in profile.blocks]),
        "full recomputation": (profile, [full.plan_of(block.name) for block in profile.blocks]),
        "this policy": (profile.with_head(policy.head), [policy.plan_of(block.name) for block in profile.blocks]),
    }
    return {name: simulate(*inputs) for name, inputs in plans.items()}


def _memory_png(profile: Profile, policy: Policy, outcomes: dict[str, Outcome]) -> bytes:
    facts = dict(policy.facts)
    budget_bytes = facts["budget_bytes"] if facts.get("budget_of") == "peak" else None
    timelines = {name: outcome.timeline for name, outcome in outcomes.items()}
    return draw_memory(timelines, profile.static_bytes, budget_bytes)


def _summary_section(profile: Profile, policy: Policy, outcomes: dict[str, Outcome]) -> list[Part]:
    plain, ours = outcomes["plain"], outcomes["this policy"]
    plain_bytes, blocks_ms = plain.stored_bytes, plain_blocks_ms(profile)
    rows = [
        (
            name,
            format_bytes(outcome.stored_bytes),
            percent(outcome.stored_bytes, plain_bytes),
            format_bytes(outcome.peak_bytes),
            f"{outcome.overhead_ms:.2f}",
            percent(outcome.overhead_ms, blocks_ms),
        )
        for name, outcome in outcomes.items()
    ]
    headers = ("predicted", "stored", "of plain", "peak of the step", "overhead ms", "of the blocks' time")
    parts: list[Part] = [
        (
            f"{profile.model_class} on {profile.device}. Policy: {policy.describe_actions()}. A step is predicted to "
            f"peak at {format_bytes(ours.peak_bytes)}, {percent(ours.peak_bytes, plain.peak_bytes)} of plain "
            f"training's {format_bytes(plain.peak_bytes)}, and to take {ours.overhead_ms:.2f} ms "
            f"({percent(ours.overhead_ms, blocks_ms)} of the blocks' time) longer."
        ),
        table(headers, rows, numbers=headers[1:]),
        (
            "Stored is the size of the tensors that forward stores for backward. Peak is the most live tensor bytes, "
            "with parameters, gradients and optimizer state. Overhead is the time for replay, encoding and decoding. "
            "The blocks' time is their estimated time in a plain step, three times their forward."
        ),
        f"{_capitalized('; '.join([describe_head(policy, profile), *describe_host(policy, profile)]))}.",
    ]
    return parts


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def percent(part: float, total: float) -> str:
    """Return the share of `part` in `total` as text in percent, or "-" if the total is 0."""
    return f"{100 * part / total:.1f} %" if total else "-"


def _actions_section(profile: Profile, policy: Policy) -> list[Part]:
    parts: list[Part] = [
        "## Actions",
        (
            "The reason has the costs of all possible actions: the time per step, the bytes that it frees, and a "
            "codec's relative L2 error. The time of an operator that two rows need is in both, though it runs once."
        ),
    ]
    for title, notes, rows in describe_plans(policy, profile):
        parts += [f"### {title}", *(f"{_capitalized(note)}." for note in notes)]
        parts += [table(HEADERS, rows, {"bytes"})] if rows else []
    return parts


def timeline_parts(history: Sequence[Record]) -> list[Part]:
    """Return the report's section with the picture of the run, or [] if `history` has no numbers to draw.

    The numbers come from events of tracking (outliers and errors) and of memory.
    """
    if not any(record["event"] in ("tracking", "memory") for record in history):
        return []
    return [
        "## The run",
        (
            "Outliers are channels stored raw at each tracking step: the maximum over all blocks of a kind. Vertical "
            "lines are policy changes and events of the guard. Predicted time is the time of the steps before a change "
            "plus the change in overhead."
        ),
        Figure("timeline.png", "Outliers, errors, step time and peak over the run", draw_timeline(history)),
    ]


def fallback_parts(history: Sequence[Record]) -> list[Part]:
    """Return the report's section on steps that did not follow the policy, or [] if `history` is empty."""
    return ["## Execution of the steps", *describe_fallbacks(history)] if history else []


def event_parts(history: Sequence[Record]) -> list[Part]:
    """Return the report's section on the events of the run, or [] if `history` is empty."""
    if not history:
        return []
    rows = []
    for record in history:
        details = [
            f"{name.removesuffix('_bytes').replace('_', ' ')} {_report_cell(name, value)}"
            for name, value in record.items()
            if name not in ("step", "event")
        ]
        rows.append((str(record["step"]), record["event"], "; ".join(details)))
    return ["## Events", table(("step", "event", "details"), rows, {"step"})]


def _report_cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
