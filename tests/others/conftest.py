"""Fixtures that run the pinned list once without and once with the callback, and a table of the outcomes."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "memory_meter")]

from othersrun import cases, processes, tiny  # noqa: E402

ROW = "others row"
HEADINGS = ("case", "verdict", "peak without", "with", "last step without", "with")


@pytest.fixture(scope="session")
def outcomes() -> Callable[[str], tuple[dict[str, Any], dict[str, Any]]]:
    """Return `outcomes(group)`: the outcomes of a group without and with the callback. Each group runs once."""
    if not cases.PACKAGES.exists():
        pytest.skip("the packages are missing: run `make test-others`, which fetches them")
    tiny.make(cases.MADE)
    return cache(processes.run_both)


@pytest.fixture(scope="session")
def group_of() -> dict[str, str]:
    """Return the group of each case, by the case's name."""
    return {case.name: group for group, members in cases.groups().items() for case in members}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    rows = [value for report in reports for name, value in report.user_properties if name == ROW]
    if rows:
        widths = [max(len(row[column]) for row in [HEADINGS, *rows]) for column in range(len(HEADINGS))]
        for row in [HEADINGS, *rows]:
            cells = [text.ljust(width) if place < 2 else text.rjust(width) for place, (text, width) in
                     enumerate(zip(row, widths, strict=True))]  # fmt: skip
            terminalreporter.write_line("  ".join(cells).rstrip())
