"""Information on tasks in a record, and the text of scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adacc_hf.eval.tasks.lm_eval_tasks import load_tasks
from adacc_hf.eval.tasks.task_scores import percent, task_info


def test_info_changes_with_the_rows_and_the_limit(data_dir: Path) -> None:
    names = ["lambada_openai", "sciq"]
    original_info = task_info(load_tasks(names, data_dir), None)
    assert task_info(load_tasks(names, data_dir), None) == original_info
    assert task_info(load_tasks(names, data_dir), 3) != original_info
    (data_dir / "lambada_openai" / "test.jsonl").write_text(json.dumps({"text": "Some other words"}) + "\n")
    changed_info = task_info(load_tasks(names, data_dir), None)
    assert changed_info["tasks"]["lambada_openai"] != original_info["tasks"]["lambada_openai"]
    assert changed_info["tasks"]["sciq"] == original_info["tasks"]["sciq"]


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"acc": 0.3956, "acc_stderr": 0.01}, "39.56 ± 1.00"),
        ({"acc": 1.0, "acc_stderr": None}, "100.00"),
        ({"acc": None}, ""),
    ],
)
def test_percent(figures: dict[str, float | None], text: str) -> None:
    assert percent(figures) == text
