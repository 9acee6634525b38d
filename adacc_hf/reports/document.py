"""Report in Markdown, which is also shown as HTML, in a browser or in a notebook."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from adacc_hf.artifacts.tables import ACTION_COLORS
from adacc_hf.reports.plots import plot_module

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
SCOPE table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
SCOPE table { display: block; overflow-x: auto; }
SCOPE th, SCOPE td { padding: 3px 10px; text-align: left; border-bottom: 1px solid rgba(128, 128, 128, 0.35); }
SCOPE th, SCOPE td { white-space: nowrap; }
SCOPE th { border-bottom: 2px solid rgba(128, 128, 128, 0.8); }
SCOPE .action { padding: 1px 7px; border-radius: 4px; }
"""
"""CSS for the parts of a document. SCOPE is replaced by the selector of the element that contains the parts."""
TEXT_COLORS = {"retain": "#fff", "compress": "#1f2328", "recompute": "#1f2328"}
"""Text colours on `ACTION_COLORS`, readable on light and dark pages."""
SCOPE = "adacc-report"
"""CSS class of the element around a report in a notebook, so that the notebook's other cells keep their style."""
SYNTAX = ("heading", "image", "escape", "table")
"""Rules of Markdown that a report uses besides paragraphs. Names such as `_to_copy` and `<lambda>` stand for
themselves."""


@dataclass(frozen=True)
class Figure:
    """PNG image in a report. Markdown links to the file `file_name` in the report's folder. HTML embeds the image."""

    file_name: str
    caption: str
    png: bytes

    def __str__(self) -> str:
        return f"![{self.caption}]({self.file_name})"


Part = str | Figure
"""Part of a report: a figure, or a heading, paragraph or table in Markdown."""


def to_markdown(parts: Sequence[Part]) -> str:
    """Return the document that consists of `parts` as GitHub-flavoured Markdown."""
    return "\n\n".join(map(str, parts)) + "\n"


def to_html(parts: Sequence[Part]) -> str:
    """Return the document that consists of `parts` as HTML, with its pictures and with names of actions in colours."""
    html = plot_module("markdown_it").MarkdownIt("zero").enable(SYNTAX).render(to_markdown(parts))
    for figure in (part for part in parts if isinstance(part, Figure)):
        data = base64.b64encode(figure.png).decode("ascii")
        html = html.replace(f'src="{figure.file_name}"', f'src="data:image/png;base64,{data}"')
    return re.sub(rf"<td>({'|'.join(ACTION_COLORS)})</td>", r'<td><span class="action \1">\1</span></td>', html)


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
        return (f"# {self.title}", *self.overview, *self.details)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The report's pictures: PNG bytes with captions."""
        return tuple(part for part in self.parts if isinstance(part, Figure))

    @property
    def page(self) -> str:
        """The report as one HTML page without external files."""
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(self.title)}</title>\n'
            f"<style>{_STYLE}{_content_style('body')}{_DARK_STYLE}</style>\n</head>\n<body>\n{to_html(self.parts)}"
            "</body>\n</html>\n"
        )

    def save(self, folder: str | Path) -> Path:
        """Write report.md, report.html and the pictures into `folder`. Return the path of report.md.

        Raises NotADirectoryError if `folder` is a file.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"report folder {folder} is a file: choose another folder")
        page = self.page
        folder.mkdir(parents=True, exist_ok=True)
        for figure in self.figures:
            _write_atomically(folder / figure.file_name, figure.png)
        _write_atomically(folder / "report.html", page.encode())
        _write_atomically(folder / "report.md", to_markdown(self.parts).encode())
        return folder / "report.md"

    def __str__(self) -> str:
        return to_markdown(self.parts)

    def __repr__(self) -> str:
        return f"<{self.title}: print(report) prints it, report.save(folder) writes it with its pictures>"

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook's cell, in the colours of the notebook."""
        return (
            f'<div class="{SCOPE}"><style>{_content_style(f".{SCOPE}")}</style>\n{to_html(self.overview)}'
            f"<details><summary>Every activation and event</summary>\n{to_html(self.details)}</details></div>"
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
