"""Markdown and HTML keep their table cells apart, whatever the cells contain."""

from __future__ import annotations

import base64
import re
from html import unescape

import pytest
from html_pages import Page

from adacc_hf.artifacts.tables import table
from adacc_hf.reports.document import Figure, Report, to_html, to_markdown

PARTS = [
    "# Title",
    "a < b & _c_",
    table(("name", "bytes"), [("x|y", "1"), ("<b>", "2")], numbers={"bytes"}),
    Figure("map.png", "a map", b"\x89PNG"),
]


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    assert to_markdown(PARTS) == (
        "# Title\n\na < b & _c_\n\n| name | bytes |\n| --- | ---: |\n| x\\|y | 1 |\n| <b> | 2 |\n\n![a map](map.png)\n"
    )


def test_html_is_well_formed_and_self_contained() -> None:
    html = to_html([*PARTS, table(("action",), [("retain",), ("compress(int8)",)])])
    page = Page(html)
    assert page.cells == ["name", "bytes", "x|y", "1", "<b>", "2", "action", "retain", "compress(int8)"]
    assert "<p>a &lt; b &amp; _c_</p>" in html
    assert page.images == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]


def test_table_refuses_a_row_of_another_length() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells under 2 headers"):
        table(("a", "b"), [("only one",)])


@pytest.fixture
def report() -> Report:
    return Report(title="Title", parts=(*PARTS[1:], table(("step",), [("42",)])))


def test_a_notebook_shows_the_page_in_a_frame(report) -> None:
    (page,) = re.findall(r'^<iframe srcdoc="([^"]*)" [^<>]*></iframe>$', report._repr_html_())
    assert unescape(page) == report.page
    cells = Page(report.page.removeprefix("<!DOCTYPE html>\n"))
    assert cells.cells == ["name", "bytes", "x|y", "1", "<b>", "2", "step", "42"]
    assert cells.images == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]


def test_a_report_works_outside_notebooks(report, tmp_path) -> None:
    assert str(report) == to_markdown(["# Title", *report.parts])
    assert repr(report) == "<Title: print(report) prints it, report.save(folder) writes it with its pictures>"
    assert report.save(tmp_path / "new") == tmp_path / "new" / "report.md"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"report.md", "report.html", "map.png"}
