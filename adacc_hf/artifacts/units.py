"""Parsing and formatting of sizes in bytes, such as "20GiB"."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
UNITS = "B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
"""Units of a size, for error messages."""
MAX_BYTES = 2**63 - 1
"""Largest accepted size: torch counts bytes in signed 64-bit integers."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_MISSPELLED = re.compile(r"\s*([0-9]+(?:[.,][0-9]+)?)\s*([KMGT])[A-Za-z]*\s*", re.IGNORECASE)


def parse_bytes(
    text: str, setting: str, advice: str = f'write a number and one of {UNITS}, for example "20GiB"'
) -> int:
    """Convert `text` ("20GiB", "512 MB", "1048576") to a number of bytes.

    Raises ValueError, with the name `setting` and the `advice` in the message, for any other string.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).upper() not in _UNITS:
        raise ValueError(f"{setting}={text!r} is not a size{_size_hint(text)}: {advice}")
    num_bytes = Decimal(match.group(1)) * _UNITS[match.group(2).upper()]
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{setting}={text!r} is more than any device has: give at most {MAX_BYTES} bytes")
    return int(num_bytes)


def _size_hint(text: str) -> str:
    """Return a hint for the error message if the unit of a size is misspelled, as in "20G" or "20 gigabytes", else
    ""."""
    match = _MISSPELLED.fullmatch(text)
    if match is None:
        return ""
    return f', which may have been meant as "{match.group(1).replace(",", ".")}{match.group(2).upper()}iB"'


def format_bytes(num_bytes: int) -> str:
    """Format `num_bytes` in the largest binary unit in which the number is 1 or more: 1536 -> "1.50 KiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
