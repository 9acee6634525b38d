"""Byte sizes as text."""

import pytest

from adacc_hf.artifacts.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("17", 17), ("17 B", 17), ("1kb", 1000), ("1KiB", 1024), ("1.5 GiB", 3 << 29), (" 2TB ", 2 * 10**12)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_bytes(text, "size") == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e3", "inf", "1 2"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"size='.*' is not a size: write a number and one of B, KB"):
        parse_bytes(text, "size")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 << 29, "2.50 GiB"),
        (3 << 50, "3072.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_above_one(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize("text", ["8388608 TiB", 400 * "9"], ids=["2^63", "400 digits"])
def test_a_size_that_no_device_has_is_refused(text):
    with pytest.raises(ValueError, match=r"size='.*' is more than any device has: give at most 9223372036854775807"):
        parse_bytes(text, "size")
