"""Tables and sentences as text that fits the width of a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from textwrap import wrap

LEAST_COLUMNS = 80
"""Minimum width to which text is fitted. A narrower terminal breaks the lines itself."""
LEAST_CELL = 36
"""Minimum width in characters to which cells of the last column are wrapped. If less is left, the column starts a new
line."""
MARGIN = 2
CONTINUATION = 4
"""Number of spaces before a column that does not fit and therefore starts a new line."""
GAP = "  "


def terminal_columns() -> int:
    """Return the width of the terminal in characters (or $COLUMNS, if it is set), but at least 80."""
    return max(shutil.get_terminal_size().columns, LEAST_COLUMNS)


def fit_lines(text: str, columns: int) -> str:
    """Return `text` with all lines longer than `columns` wrapped. Continued lines are indented by two more spaces."""
    lines = []
    for line in text.splitlines():
        if len(line) <= columns:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        lines += wrap(line, columns, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
    return "\n".join(lines)


def table_lines(rows: Sequence[Sequence[str]], *, columns: int | None, right: Collection[int] = ()) -> list[str]:
    """Return the lines of a text table, whose first row is the header. The columns in `right` are aligned to the right.

    If a row does not fit into `columns` characters, later columns of all rows start a new line, and long cells of the
    last column are wrapped. If `columns` is None, each row is one line.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    places = _places(widths, columns)
    return [line for row in rows for line in _row_lines(row, widths, places, columns, right)]


def _places(widths: Sequence[int], columns: int | None) -> list[tuple[bool, int]]:
    """Return (starts_line, position) for each column of a table. A row that is too wide for the terminal is continued
    on further lines. `starts_line` is True for a column with which such a line begins. `position` is the number of
    characters before the column in its line."""
    places = []
    position = MARGIN
    for column, width in enumerate(widths):
        is_last = column == len(widths) - 1
        room = min(width, LEAST_CELL) if is_last else width
        starts_line = column > 0 and columns is not None and position + room > columns
        position = CONTINUATION if starts_line else position
        places.append((starts_line, position))
        position += width + len(GAP)
    return places


def _row_lines(
    row: Sequence[str],
    widths: Sequence[int],
    places: Sequence[tuple[bool, int]],
    columns: int | None,
    right: Collection[int],
) -> list[str]:
    lines = [""]
    for column, (cell, width, (starts_line, position)) in enumerate(zip(row, widths, places, strict=True)):
        if starts_line:
            lines.append("")
        aligned = cell.rjust(width) if column in right else cell
        parts = [aligned] if columns is None or position + width <= columns else wrap(aligned, columns - position)
        lines[-1] = lines[-1].ljust(position) + (parts[0] if parts else "")
        lines += [" " * position + part for part in parts[1:]]
    return [line.rstrip() for line in lines]
