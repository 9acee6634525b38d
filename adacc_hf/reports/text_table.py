"""Tables and sentences as text that fits the width of a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from textwrap import wrap

LEAST_COLUMNS = 80
"""Minimum width to which text is fitted. A narrower terminal breaks the lines itself."""
GAP = "  "


def fit_lines(text: str) -> str:
    """Return `text` with all lines wrapped that are longer than the terminal's width (or $COLUMNS, if it is set), but
    at least 80. Continued lines are indented by two more spaces."""
    columns = max(shutil.get_terminal_size().columns, LEAST_COLUMNS)
    lines = []
    for line in text.splitlines():
        if len(line) <= columns:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        lines += wrap(line, columns, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
    return "\n".join(lines)


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a text table, whose first row is the header. The columns in `right` are aligned to the right.
    `fit_lines` wraps rows that are wider than a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [c.rjust(width) if column in right else c.ljust(width) for column, (c, width) in enumerate(cells)]
        lines.append(f"{GAP}{GAP.join(aligned)}".rstrip())
    return lines
