"""Tables of policies and profiles in Markdown, which notebooks show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from adacc_hf.artifacts.units import format_bytes

if TYPE_CHECKING:
    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile

ACTION_COLORS = {"retain": "#0072B2", "compress": "#E69F00", "recompute": "#D5D9DE"}
"""Colours of actions: blue, orange and light grey. Colour-blind readers can distinguish these colours, also by
lightness in grey prints."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> str:
    """Return a table of text cells in Markdown. Columns whose header is in `numbers` are right-aligned."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells under {len(headers)} headers: {row!r}")
    rule = ["---:" if header in numbers else "---" for header in headers]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (headers, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def policy_tables(title: str, policy: Policy) -> str:
    """Return `title` and a table of the policy's plans: their blocks, and the number of activations per action."""
    rows = []
    for index, plan in enumerate(policy.plans):
        members = [position for position, (_, plan_index) in enumerate(policy.blocks) if plan_index == index]
        names = describe_names([name for name, _ in policy.blocks], members)
        if plan.is_idle:
            rows.append([names, "not trained", "", "", ""])
            continue
        counts = [sum(choice.action.value == name for _, choice in plan.choices) for name in ACTION_COLORS]
        rows.append([names, plan.block_action.value, *map(str, counts)])
    return f"`{title}`\n\n{table(('blocks', 'run as', *ACTION_COLORS), rows, ACTION_COLORS)}\n"


def profile_tables(profile: Profile) -> str:
    """Return a profile's description, its main figures, and a table of its kinds of blocks."""
    figures = {
        "stored for backward by plain training": format_bytes(profile.plain_stored_bytes),
        "live before a step: parameters, optimizer, batch": format_bytes(profile.static_bytes),
        "available on the device": format_bytes(profile.available_bytes),
        "forward and backward under full recomputation, with their memory recorded": f"{profile.step_ms:.2f} ms",
    }
    kinds = [
        [
            kind.block_class,
            str(sum(block.kind == index for block in profile.untiled.blocks)),
            str(len(kind.activations)),
            format_bytes(sum(value.nbytes for value in kind.activations if value.saved)),
            f"{kind.forward_ms:.2f}",
        ]
        for index, kind in enumerate(profile.untiled.kinds)
    ]
    headers = ("kind of block", "blocks", "activations", "bytes of a block", "forward ms")
    tables = table(("profile", "value"), list(figures.items()), {"value"}), table(headers, kinds, headers[1:])
    return f"`{profile!r}`\n\n{tables[0]}\n\n{tables[1]}\n"


def describe_names(names: Sequence[str], positions: Sequence[int]) -> str:
    """Return the names at `positions` as text. Consecutive positions become one range: "h.0 to h.4 (5 blocks), h.7"."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][-1] + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    words = [
        names[run[0]] if len(run) == 1 else f"{names[run[0]]} to {names[run[-1]]} ({len(run)} blocks)" for run in runs
    ]
    return ", ".join(words)
