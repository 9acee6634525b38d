"""Tables and sentences, fitted to a width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.reports.text_table import fit_lines, table_lines

ROWS = [("name", "bytes", "reason"), ("weight", "8.00 KiB", "retain: frees nothing")]
cells = st.lists(st.text("ab;", min_size=1, max_size=9), max_size=12).map(" ".join)


def test_columns_are_aligned() -> None:
    assert table_lines(ROWS, right=(1,)) == [
        "  name       bytes  reason",
        "  weight  8.00 KiB  retain: frees nothing",
    ]


@given(st.lists(cells), st.integers(80, 120))
def test_sentences_are_wrapped_and_keep_their_words(lines, columns) -> None:
    text = "\n".join(f"  {line}" for line in lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        fitted = fit_lines(text)
    assert all(len(line) <= columns for line in fitted.splitlines())
    assert fitted.split() == text.split()


@pytest.mark.parametrize(("variable", "columns"), [("133", 133), ("20", 80)])
def test_the_width_is_the_terminals_and_at_least_80(variable, columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", variable)
    assert len(fit_lines("a" * 500).splitlines()[0]) == columns
