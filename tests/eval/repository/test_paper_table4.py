"""The paper's figures, compared with the means that the paper prints."""

from __future__ import annotations

import pytest

from adacc_hf.eval.repository.paper_table4 import PAPER_TABLE4, paper_figures, paper_table_text

ROWS = [(*model, method, *values) for model, methods in PAPER_TABLE4.items() for method, values in methods.items()]

PRINTED_WRONG = ("117M", 64, "adacc_no_outlier")
"""Row whose mean over the columns is 51.09, where the paper prints 51.03."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[:3])))
def test_means_are_those_of_the_columns(row: tuple[float | None, ...]) -> None:
    *columns, mean = row[3:]
    # The figures have two decimals, and the last one is sometimes truncated and sometimes rounded. A dash counts as 0.
    tolerance = 0.0101 if row[:3] != PRINTED_WRONG else 0.0601
    assert sum(value or 0.0 for value in columns) / 4 == pytest.approx(mean, abs=tolerance)


def test_the_paper_as_text_and_as_a_record() -> None:
    assert "| 345M, batch 16, Adacc w/o outlier |" in paper_table_text()
    assert len(paper_table_text().splitlines()) == 2 + 16
    assert paper_figures()["117M, batch 64"]["adacc"]["Ave."] == 51.44
