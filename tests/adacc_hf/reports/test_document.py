"""Markdown and HTML keep their table cells apart, whatever the cells contain."""

from __future__ import annotations

import base64

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
    html = to_html([*PARTS, table(("action",), [("retain",)])])
    page = Page(html)
    assert page.cells == ["name", "bytes", "x|y", "1", "<b>", "2", "action", "retain"]
    assert "<p>a &lt; b &amp; _c_</p>" in html
    assert 'class="action retain"' in html
    assert page.images == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]


def test_table_refuses_a_row_of_another_length() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells under 2 headers"):
        table(("a", "b"), [("only one",)])


@pytest.fixture
def report() -> Report:
    return Report(title="Title", overview=tuple(PARTS[1:]), details=(table(("step",), [("42",)]),))


def test_a_report_is_shown_in_a_notebook_with_its_pictures(report) -> None:
    html = report._repr_html_()
    cell = Page(html)
    assert cell.cells == ["name", "bytes", "x|y", "1", "<b>", "2", "step", "42"]
    assert cell.images == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]
    assert html.index("<details>") < html.index("42") < html.index("</details>")


def test_the_style_of_a_report_applies_to_its_own_cell_only(report) -> None:
    style = report._repr_html_().split("<style>")[1].split("</style>")[0]
    selectors = [part.strip() for rule in style.split("}")[:-1] for part in rule.split("{")[0].split(",")]
    assert selectors
    assert all(selector.startswith(".adacc-report ") for selector in selectors), selectors


def test_a_report_works_outside_notebooks(report, tmp_path) -> None:
    assert str(report) == to_markdown(report.parts)
    assert repr(report) == "<Title: print(report) prints it, report.save(folder) writes it with its pictures>"
    assert report.save(tmp_path / "new") == tmp_path / "new" / "report.md"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"report.md", "report.html", "map.png"}
