"""Tables and sentences, fitted to a width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.reports.text_table import fit_lines, table_lines, terminal_columns

ROWS = [("name", "bytes", "reason"), ("weight", "8.00 KiB", "retain: frees nothing; recompute: not possible; int8: no")]
FITTED = {
    None: """\
  name       bytes  reason
  weight  8.00 KiB  retain: frees nothing; recompute: not possible; int8: no""",
    60: """\
  name       bytes  reason
  weight  8.00 KiB  retain: frees nothing; recompute: not
                    possible; int8: no""",
    50: """\
  name       bytes
    reason
  weight  8.00 KiB
    retain: frees nothing; recompute: not
    possible; int8: no""",
}
"""ROWS without a width, with a wrapped last column, and with columns without room, which start a line in every row."""
cells = st.lists(st.text("ab;", min_size=1, max_size=9), max_size=12).map(" ".join)


@pytest.mark.parametrize("columns", FITTED)
def test_rows_are_fitted_to_the_columns(columns) -> None:
    assert table_lines(ROWS, columns=columns, right=(1,)) == FITTED[columns].splitlines()


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.tuples(*[cells] * n), min_size=1, max_size=5)), st.data())
def test_every_line_fits_and_no_word_is_lost(rows, data) -> None:
    columns = data.draw(st.integers(80, 200))
    right = data.draw(st.sets(st.integers(0, len(rows[0]) - 1)))
    lines = table_lines(rows, columns=columns, right=right)
    assert max(map(len, lines)) <= columns
    assert sorted(" ".join(lines).split()) == sorted(word for row in rows for cell in row for word in cell.split())


@given(st.lists(cells), st.integers(80, 120))
def test_sentences_are_wrapped_and_keep_their_words(lines, columns) -> None:
    text = "\n".join(f"  {line}" for line in lines)
    fitted = fit_lines(text, columns)
    assert all(len(line) <= columns for line in fitted.splitlines())
    assert fitted.split() == text.split()


@pytest.mark.parametrize(("variable", "columns"), [("133", 133), ("20", 80)])
def test_the_width_is_the_terminals_and_at_least_80(variable, columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", variable)
    assert terminal_columns() == columns
