"""The guide's code runs unchanged, and its table of settings agrees with AdaccConfig."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from forked_runs import run_forked

from adacc_hf import AdaccConfig

GUIDE = (Path(__file__).parent.parent / "docs" / "GUIDE.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"^\| `(\w+)` +\| `(.+?)` +\| (.*?) *\|", GUIDE.split("## All settings")[1], re.MULTILINE)
RANGES = {name: ast.literal_eval(text) for name, _, text in SETTINGS if text.startswith("[")}


@pytest.mark.gate
def test_guide_code_runs_in_its_order(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    (tmp_path / "guide.py").write_text(code, encoding="utf-8")
    process = run_forked(tmp_path / "guide.py", cwd=tmp_path, ACCELERATE_USE_CPU="true")
    assert process.returncode == 0, process.stderr
    budgets = [line.split()[0] for line in process.stdout.splitlines() if "blocks" in line]
    assert budgets == ["0.8", "0.6", "0.4", "0.2"]
    assert (tmp_path / "adacc_policy.json").is_file()


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
