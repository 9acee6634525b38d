"""HTML of policies and profiles for notebooks: small tables in the colours of the page around them.

A notebook may be light or dark, and may refuse style sheets in an output cell. So text and lines inherit the page's
colours, all styles are attributes, and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from adacc_hf.artifacts.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Choice, Plan, Policy
    from adacc_hf.artifacts.profile import Profile

ACTION_COLORS = {"retain": "#0072B2", "compress": "#E69F00", "recompute": "#D5D9DE"}
"""Colours of actions: blue, orange and light grey. Colour-blind readers can distinguish these colours, also by
lightness in grey prints."""
TEXT_COLORS = {"retain": "#fff", "compress": "#1f2328", "recompute": "#1f2328"}
"""Text colours on `ACTION_COLORS`, readable on light and dark pages."""

CELL = "padding:2px 10px;text-align:{side};border-bottom:1px solid rgba(128,128,128,0.4);white-space:nowrap"
MAX_ROWS = 60
"""Maximum number of rows in a table. If a block has more activations, the last row gives the number of activations that
are left out."""


def table_html(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> str:
    """Return an HTML table. Cells are HTML, headers are text. Columns with a header in `numbers` are right-aligned."""
    sides = ["right" if header in numbers else "left" for header in headers]
    head = "".join(_notebook_cell("th", side, escape(header)) for side, header in zip(sides, headers, strict=True))
    body = "".join(
        "<tr>" + "".join(_notebook_cell("td", side, cell) for side, cell in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    )
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
    return f'<table style="{style}"><tr>{head}</tr>{body}</table>'


def action_html(choice: Choice) -> str:
    """Return HTML for an action: the name of the action on the action's colour."""
    name = choice.action.value
    style = f"background:{ACTION_COLORS[name]};color:{TEXT_COLORS[name]};padding:1px 7px;border-radius:4px"
    return f'<span style="{style}">{escape(str(choice))}</span>'


def policy_html(policy: Policy) -> str:
    """Return HTML with a description of a policy and a table of its plans."""
    return paragraph(policy.describe()) + plans_html(policy)


def plans_html(policy: Policy) -> str:
    """Return an HTML table of a policy's plans: their blocks, and the number of activations with each action."""
    rows = []
    for index, plan in enumerate(policy.plans):
        names = [name for name, plan_index in policy.blocks if plan_index == index]
        if plan.is_idle:
            rows.append([escape(describe_names(names)), "not trained", "", "", ""])
            continue
        counts = [sum(choice.action.value == name for _, choice in plan.choices) for name in ACTION_COLORS]
        rows.append([escape(describe_names(names)), plan.block_action.value, *map(str, counts)])
    actions = list(ACTION_COLORS)
    return table_html(("blocks", "run as", *actions), rows, numbers=actions)


def policy_map_html(policy: Policy, profile: Profile) -> str:
    """Return an HTML table for each kind of block. Rows are activations, and columns are plans, named by the blocks
    they are for.

    `policy` and `profile` belong together (`reports.explain.check_belongs`).
    """
    profile = profile.under([policy.plans[index] for _, index in policy.blocks])
    kinds = {name: block.kind for block, (name, _) in zip(profile.blocks, policy.blocks, strict=True)}
    plans_of_kind: dict[int, dict[str, Plan]] = {}
    for index, plan in enumerate(policy.plans):
        names = [name for name, plan_index in policy.blocks if plan_index == index]
        if not plan.is_idle:
            plans_of_kind.setdefault(kinds[names[0]], {})[describe_names(names)] = plan
    tables = []
    for kind_index, plans in plans_of_kind.items():
        kind = profile.kinds[kind_index]
        rows = [
            [
                escape(kind.names[value.index]),
                format_bytes(value.nbytes),
                *(action_html(plan.choice(value.index)) for plan in plans.values()),
            ]
            for value in kind.activations[:MAX_ROWS]
        ]
        if len(kind.activations) > MAX_ROWS:
            rows.append([f"and {len(kind.activations) - MAX_ROWS} more", "", *("" for _ in plans)])
        tables.append(paragraph(kind.block_class) + table_html(("activation", "bytes", *plans), rows, {"bytes"}))
    return "".join(tables)


def profile_html(profile: Profile) -> str:
    """Return HTML with a table of a profile's main metrics, and a table of its kinds of blocks."""
    figures: Mapping[str, str] = {
        "stored for backward by plain training": format_bytes(profile.plain_stored_bytes),
        "live before a step: parameters, optimizer, batch": format_bytes(profile.static_bytes),
        "available on the device": format_bytes(profile.available_bytes),
        "forward and backward under full recomputation, with their memory recorded": f"{profile.step_ms:.2f} ms",
    }
    kinds = [
        [
            escape(kind.block_class),
            str(sum(block.kind == index for block in profile.untiled.blocks)),
            str(len(kind.activations)),
            format_bytes(sum(value.nbytes for value in kind.activations if value.saved)),
            f"{kind.forward_ms:.2f}",
        ]
        for index, kind in enumerate(profile.untiled.kinds)
    ]
    headers = ("kind of block", "blocks", "activations", "bytes of a block", "forward ms")
    return (
        paragraph(repr(profile))
        + table_html(("profile", "value"), [[escape(name), value] for name, value in figures.items()], {"value"})
        + table_html(headers, kinds, headers[1:])
    )


def paragraph(text: str) -> str:
    """Return a paragraph of HTML for a notebook."""
    return f"<p>{escape(text)}</p>"


def describe_names(names: Sequence[str]) -> str:
    """Return a short string that lists the blocks `names`, which share a plan: "h.0, h.1 and 4 more, up to h.9"."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more, up to {names[-1]}"


def _notebook_cell(tag: str, side: str, content: str) -> str:
    return f'<{tag} style="{CELL.format(side=side)}">{content}</{tag}>'
