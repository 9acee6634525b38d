"""Document of headings, paragraphs, tables and figures, written as Markdown or as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

ACTION_COLORS = {"retain": "#0072B2", "compress": "#E69F00", "recompute": "#D5D9DE"}
"""Blue, orange and light grey, distinguishable by colour-blind readers and, by lightness, in grey prints."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.7em; } h2 { font-size: 1.25em; margin-top: 2em; }
img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 3px 10px; text-align: left; border-bottom: 1px solid #e3e6ea; white-space: nowrap; }
th { border-bottom: 2px solid #8c959f; }
td.number, th.number { text-align: right; }
.action { padding: 1px 7px; border-radius: 4px; }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Figure:
    """PNG image. Markdown links to the file `file_name` in the same folder; HTML embeds the bytes."""

    file_name: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Table:
    """Table of text cells. Columns with a header in `numbers` are right-aligned."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"a row has {len(row)} cells under {len(self.headers)} headers: {row!r}")


Part = Heading | Paragraph | Figure | Table


def to_markdown(parts: Sequence[Part]) -> str:
    """Return the document as GitHub-flavoured Markdown."""
    return "\n\n".join(_part_to_markdown(part) for part in parts) + "\n"


def to_html(title: str, parts: Sequence[Part]) -> str:
    """Return the document as one HTML page without external files."""
    body = "\n".join(_part_to_html(part) for part in parts)
    colors = "".join(
        f".{name} {{ background: {color}; color: {'#fff' if name == 'retain' else '#1f2328'}; }}\n"
        for name, color in ACTION_COLORS.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{colors}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _part_to_markdown(part: Part) -> str:
    if isinstance(part, Heading):
        return f"{'#' * part.level} {part.text}"
    if isinstance(part, Paragraph):
        return part.text
    if isinstance(part, Figure):
        return f"![{part.caption}]({part.file_name})"
    rule = ["---:" if header in part.numbers else "---" for header in part.headers]
    return "\n".join(_markdown_row(cells) for cells in (part.headers, rule, *part.rows))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _part_to_html(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h{part.level}>{escape(part.text)}</h{part.level}>"
    if isinstance(part, Paragraph):
        return f"<p>{escape(part.text)}</p>"
    if isinstance(part, Figure):
        data = base64.b64encode(part.png).decode("ascii")
        return f'<p><img alt="{escape(part.caption)}" src="data:image/png;base64,{data}"></p>'
    return _table_to_html(part)


def _table_to_html(table: Table) -> str:
    classes = [' class="number"' if header in table.numbers else "" for header in table.headers]
    head = "".join(f"<th{c}>{escape(header)}</th>" for c, header in zip(classes, table.headers, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{c}>{_cell_to_html(cell)}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in table.rows
    ]
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n' + "\n".join(rows) + "\n</table></div>"


def _cell_to_html(cell: str) -> str:
    return f'<span class="action {cell}">{cell}</span>' if cell in ACTION_COLORS else escape(cell)
