"""The guide is short, and its table of settings agrees with AdaccConfig."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from adacc_hf import AdaccConfig

GUIDE_PATH = Path(__file__).parents[1] / "docs" / "GUIDE.md"
GUIDE = GUIDE_PATH.read_text(encoding="utf-8")
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


def test_its_measurements_are_those_of_the_records():
    results, (table,) = (
        GUIDE_PATH.parents[1] / "eval" / "results" / "cpu",
        re.findall(r"\| measurement .*?\n\n", GUIDE, re.S),
    )
    points = {
        n: json.loads((results / f"{n}.json").read_text())["train_info"]["points"] for n in ("throughput", "peers")
    }
    naive = [p["gate"]["gradient_error"] for k, p in points["throughput"].items() if k.startswith("quantization,")]
    ours = [points["peers"][f"adacc_{budget}"]["gate"]["gradient_error"] for budget in (0.5, 0.35, 0.25, 0.15)]
    assert f"error {min(naive):.3f} to {max(naive):.3f}" in table
    assert f"error {min(ours):.0f} to {max(ours):.3f}" in table
    (gap,) = re.findall(r"\| Adacc +\| .*?\| +\+([\d.]+ %)", (results / "loss.md").read_text())
    assert f"{gap} above plain" in table
    longest = dict(
        re.findall(r"^\| (.*?) +\| +([\d,]+) \|", (results / "longest.md").read_text().split("qwen3:")[0], re.M)
    )
    lengths = [longest[name] for name in ("Adacc", "Adacc, exact", "checkpointing, chunked head, tiles")]
    assert re.findall(r"\d+,\d+", table) == lengths
    exact = (results / "verify_methods.md").read_text().split("Exact in ")[1]
    num_cases, counts = exact.split()[0], dict(re.findall(r"(\S+) (\d+)[,.]", exact))
    readme = " ".join((GUIDE_PATH.parents[1] / "README.md").read_text().split())
    assert f"Of {num_cases} small models" in readme
    assert f"trains {counts['adacc']} exactly, torch's checkpoint {counts['checkpointing']}]" in readme
