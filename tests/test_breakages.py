"""Breaks of `tests/breakages`: each applies to the code as it is. No break is tried."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

spec = importlib.util.spec_from_file_location("breakages", ROOT / "tests" / "breakages" / "__main__.py")
breakages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(breakages)


@pytest.mark.parametrize("number", breakages.ALL_NUMBERS)
def test_a_break_applies(number: int) -> None:
    """The text occurs once in its file, the broken file is valid Python, and the file has a folder of tests."""
    path, old, new = breakages.BREAKS[number - 1]
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r}: update BREAKS in tests/breakages/__main__.py"
    ast.parse(breakages.broken_text(number))
    assert new != old
    assert (ROOT / breakages.folder_of_tests(number)).is_dir()


def test_the_gate_is_that_of_make_test_all() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntest-all:")[2].partition("\n\n")[0]
    assert re.findall('-m "(.+)"', recipe) == [breakages.MARKERS]


def test_each_break_has_a_test_that_notices_it() -> None:
    tests_by_break = breakages.noticed_by()
    assert len(tests_by_break) == len(breakages.BREAKS), "the replaced texts of one file differ"
    for test in tests_by_break.values():
        path, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text(encoding="utf-8"), test
