"""The guide is short, and its table of settings agrees with AdaccConfig."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from adacc_hf import AdaccConfig

GUIDE = (Path(__file__).parent.parent / "docs" / "GUIDE.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"^\| `(\w+)` +\| `(.+?)` +\| (.*?) *\|", GUIDE.split("## All settings")[1], re.MULTILINE)
RANGES = {name: ast.literal_eval(text) for name, _, text in SETTINGS if text.startswith("[")}


def test_it_is_short_and_its_code_is_on_pages_that_are_run():
    assert len(GUIDE.splitlines()) <= 350
    assert "```python" not in GUIDE


def test_every_setting_is_there_with_its_default():
    assert {name: ast.literal_eval(default) for name, default, _ in SETTINGS} == {
        field.name: field.default for field in fields(AdaccConfig)
    }


@pytest.mark.parametrize("name", RANGES)
def test_its_range_is_the_one_that_is_checked(name):
    low, high = RANGES[name]
    assert [getattr(AdaccConfig(**{name: end}), name) for end in (low, high)] == [low, high]
    for outside in (low - 1, high + 1):
        with pytest.raises(ValueError, match=name):
            AdaccConfig(**{name: outside})
