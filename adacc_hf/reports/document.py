"""Document of headings, paragraphs, tables and pictures, for reports in Markdown, HTML or a notebook."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from adacc_hf.artifacts.notebook_html import ACTION_COLORS, TEXT_COLORS

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.7em; } h2 { font-size: 1.25em; margin-top: 2em; }
"""
_DARK_STYLE = """
@media (prefers-color-scheme: dark) {
:root { color-scheme: dark; }
body { color: #e0e0e0; background: #1a1a1a; }
img { filter: invert(0.9) hue-rotate(180deg); }
}
"""
"""CSS for dark screens. The filter on pictures turns white into the page's #1a1a1a and dark text into light text, and
keeps the hue of colours."""
_CONTENT_STYLE = """
SCOPE img { max-width: 100%; height: auto; }
SCOPE .scroll { overflow-x: auto; }
SCOPE table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
SCOPE th, SCOPE td { padding: 3px 10px; text-align: left; border-bottom: 1px solid rgba(128, 128, 128, 0.35); }
SCOPE th, SCOPE td { white-space: nowrap; }
SCOPE th { border-bottom: 2px solid rgba(128, 128, 128, 0.8); }
SCOPE td.number, SCOPE th.number { text-align: right; }
SCOPE .action { padding: 1px 7px; border-radius: 4px; }
"""
"""CSS for the parts of a document. SCOPE is replaced by the selector of the element that contains the parts."""
SCOPE = "adacc-report"
"""CSS class of the element around a report in a notebook, so that the notebook's other cells keep their style."""


@dataclass(frozen=True)
class Heading:
    """Heading, as a part of a report."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Paragraph, as a part of a report."""

    text: str


@dataclass(frozen=True)
class Figure:
    """PNG image in a report. Markdown links to the file `file_name` in the report's folder. HTML embeds the image."""

    file_name: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Table:
    """Table of text cells in a report. Columns whose header is in `numbers` are right-aligned."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"a row has {len(row)} cells under {len(self.headers)} headers: {row!r}")


Part = Heading | Paragraph | Figure | Table


def to_markdown(parts: Sequence[Part]) -> str:
    """Return the document that consists of `parts` as GitHub-flavoured Markdown."""
    return "\n\n".join(_part_to_markdown(part) for part in parts) + "\n"


def to_html(title: str, parts: Sequence[Part]) -> str:
    """Return the document that consists of `parts` as one HTML page without external files."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{_content_style('body')}{_DARK_STYLE}</style>\n</head>\n<body>\n{_html_body(parts)}\n</body>\n"
        f"</html>\n"
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a run. `save` writes it into a folder, a notebook shows it as HTML, and `print` prints it as
    Markdown."""

    title: str
    overview: tuple[Part, ...]
    """Parts of the report that are always shown: the summary and the pictures."""
    details: tuple[Part, ...]
    """Parts of the report with one row per activation or event. A notebook shows these tables on a click."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the report, in order."""
        return (Heading(self.title, level=1), *self.overview, *self.details)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The report's pictures: PNG bytes with captions."""
        return tuple(part for part in self.parts if isinstance(part, Figure))

    def save(self, folder: str | Path) -> Path:
        """Write report.md, report.html and the pictures into `folder`. Return the path of report.md.

        Raises NotADirectoryError if `folder` is a file.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"report folder {folder} is a file: choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for figure in self.figures:
            _write_atomically(folder / figure.file_name, figure.png)
        _write_atomically(folder / "report.html", to_html(self.title, self.parts).encode())
        _write_atomically(folder / "report.md", to_markdown(self.parts).encode())
        return folder / "report.md"

    def __str__(self) -> str:
        return to_markdown(self.parts)

    def __repr__(self) -> str:
        return f"<{self.title}: print(report) prints it, report.save(folder) writes it with its pictures>"

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook's cell, in the colours of the notebook."""
        return (
            f'<div class="{SCOPE}"><style>{_content_style(f".{SCOPE}")}</style>\n{_html_body(self.overview)}\n'
            f"<details><summary>Every activation and event</summary>\n{_html_body(self.details)}\n</details></div>"
        )


def _write_atomically(path: Path, content: bytes) -> None:
    """Write a file of a report atomically, so that a reader sees the old or the new content, never a mixture."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _content_style(selector: str) -> str:
    colors = "".join(
        f"SCOPE .{name} {{ background: {color}; color: {TEXT_COLORS[name]}; }}\n"
        for name, color in ACTION_COLORS.items()
    )
    return f"{_CONTENT_STYLE}{colors}".replace("SCOPE", selector)


def _html_body(parts: Sequence[Part]) -> str:
    return "\n".join(_part_to_html(part) for part in parts)


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
    """Return the content of a table's cell as HTML. Names of actions get colours."""
    return f'<span class="action {cell}">{cell}</span>' if cell in ACTION_COLORS else escape(cell)
