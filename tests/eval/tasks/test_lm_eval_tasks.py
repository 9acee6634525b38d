"""Sources of a data set's rows, and the error messages for invalid rows."""

from pathlib import Path
from typing import Any

import pytest

from adacc_hf.eval.tasks import lm_eval_tasks
from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks, local_files

SPLITS = {"lambada_openai": "test", "arc_easy": "test", "sciq": "test", "swag": "validation"}


def prompts(task: Any) -> list[tuple[str, Any]]:
    """Return the context and the correct answer of every row."""
    return [(task.doc_to_text(row), task.doc_to_target(row)) for row in task.eval_docs]


def test_reads_every_data_set(data_dir: Path) -> None:
    tasks = load_tasks(PAPER_TASKS, data_dir)
    assert prompts(tasks["lambada_openai"])[1] == ("A buzz, a buzz", " abd")
    assert prompts(tasks["arc_easy"])[2] == ("Question: Why?\nAnswer:", 3)
    assert prompts(tasks["sciq"])[0] == ("It is.\nQuestion: What?\nAnswer:", 3)
    assert prompts(tasks["swag"])[3] == ("We go", 2)


@pytest.mark.parametrize("name", PAPER_TASKS)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_parquet_holds_the_same_rows(name: str, num_parts: int, data_dir: Path, rows: dict[str, list[Any]]) -> None:
    from datasets import Dataset

    from_json = prompts(load_tasks([name], data_dir)[name])
    split_name = SPLITS[name]
    (data_dir / name / f"{split_name}.jsonl").unlink()
    dataset = Dataset.from_list(rows[f"{name}/{split_name}"])
    for part in range(num_parts):
        suffix = "" if num_parts == 1 else f"-{part:05}-of-{num_parts:05}"
        dataset.shard(num_parts, part, contiguous=True).to_parquet(data_dir / name / f"{split_name}{suffix}.parquet")
    assert len(local_files(data_dir, name)) == num_parts
    assert prompts(load_tasks([name], data_dir)[name]) == from_json


def test_missing_file_is_named(data_dir: Path) -> None:
    (data_dir / "swag" / "validation.jsonl").rename(data_dir / "swag" / "test.jsonl")
    with pytest.raises(FileNotFoundError, match=r"has neither swag/validation\.jsonl nor "):
        load_tasks(PAPER_TASKS, data_dir)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"words": "A b"}\n', "has no text .it has words.; lambada_openai needs rows with text"),
        ('{"text": "A b"\n', "could not be read as json rows"),
        ("", "test.jsonl is empty; put the rows of lambada_openai there"),
    ],
    ids=["column", "not-json", "empty"],
)
def test_wrong_rows_are_refused(text: str, message: str, data_dir: Path) -> None:
    (data_dir / "lambada_openai" / "test.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tasks(["lambada_openai"], data_dir)


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_hub_out_of_reach_names_the_way_out(name: str, offline: None) -> None:
    with pytest.raises(ValueError, match=f"{name} could not be loaded from the hub: .* Pass --data_dir"):
        load_tasks([name], None)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    monkeypatch.setattr(lm_eval_tasks.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'adacc-hf\[eval\]'"):
        load_tasks(["sciq"], data_dir)
