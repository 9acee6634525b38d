"""Report in Markdown, which is also shown as HTML, in a browser or in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from adacc_hf.reports.plots import plot_module

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.7em; } h2 { font-size: 1.25em; margin-top: 2em; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
table { display: block; overflow-x: auto; }
th, td { padding: 3px 10px; text-align: left; border-bottom: 1px solid rgba(128, 128, 128, 0.35); white-space: nowrap; }
th { border-bottom: 2px solid rgba(128, 128, 128, 0.8); }
@media (prefers-color-scheme: dark) {
:root { color-scheme: dark; }
body { color: #e0e0e0; background: #1a1a1a; }
img { filter: invert(0.9) hue-rotate(180deg); }
}
"""
"""CSS of the page. On dark screens, the filter on pictures turns white into the page's #1a1a1a and dark text into light
text, and keeps the hue of colours."""
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
    """Return the document that consists of `parts` as HTML, with its pictures."""
    html = plot_module("markdown_it").MarkdownIt("zero").enable(SYNTAX).render(to_markdown(parts))
    for figure in (part for part in parts if isinstance(part, Figure)):
        data = base64.b64encode(figure.png).decode("ascii")
        html = html.replace(f'src="{figure.file_name}"', f'src="data:image/png;base64,{data}"')
    return html


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a run. `save` writes it into a folder, a notebook shows it as HTML, and `print` prints it as
    Markdown."""

    title: str
    parts: tuple[Part, ...]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The report's pictures: PNG bytes with captions."""
        return tuple(part for part in self.parts if isinstance(part, Figure))

    @property
    def page(self) -> str:
        """The report as one HTML page without external files."""
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(self.title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n{to_html(self._with_title())}"
            "</body>\n</html>\n"
        )

    def _with_title(self) -> tuple[Part, ...]:
        return (f"# {self.title}", *self.parts)

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
            (folder / figure.file_name).write_bytes(figure.png)
        (folder / "report.html").write_text(page, encoding="utf-8")
        (folder / "report.md").write_text(str(self), encoding="utf-8")
        return folder / "report.md"

    def __str__(self) -> str:
        return to_markdown(self._with_title())

    def __repr__(self) -> str:
        return f"<{self.title}: print(report) prints it, report.save(folder) writes it with its pictures>"

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook's cell."""
        return f'<iframe srcdoc="{escape(self.page)}" style="width: 100%; height: 45em; border: 0"></iframe>'
