"""The picture of the largest batch and the longest sequence by method."""

import pytest

from adacc_hf.reports import largest_shapes
from adacc_hf.reports.largest_shapes import draw_largest_shapes, has_largest_shapes

RECORDS = [
    {"method": "plain", "largest_batch": 91, "longest_seq_len": 4744},
    {"method": "adacc", "largest_batch": 2130, "longest_seq_len": 13_240},
]


def test_each_method_has_its_numbers_and_their_ratio_to_the_first(monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(largest_shapes, "to_png", lambda figure: figures.append(figure) or b"")
    draw_largest_shapes(RECORDS)
    batch, length = figures[0].axes
    figures[0].draw_without_rendering()
    assert [text.get_text() for text in batch.texts] == ["91", "2,130 (23.4 x)"]
    assert [text.get_text() for text in length.texts] == ["4,744", "13,240 (2.8 x)"]
    assert [bar.get_width() for bar in batch.patches] == [91, 2130]
    assert [label.get_text() for label in batch.get_yticklabels()] == ["plain", "adacc"]
    for axis in (batch, length):
        right = max(text.get_window_extent().x1 for text in axis.texts)
        assert right <= axis.get_window_extent().x1, "no number is cut off"


@pytest.mark.parametrize(
    ("records", "is_drawn"),
    [
        (RECORDS, True),
        ([], False),
        ([{"method": "a"}], False),
        ([RECORDS[0], {**RECORDS[1], "largest_batch": None}], False),
        ([{"method": "plain", "largest_batch": 0, "longest_seq_len": 0}], False),
    ],
)
def test_only_complete_numbers_are_drawn(records, is_drawn) -> None:
    assert has_largest_shapes(records) == is_drawn
