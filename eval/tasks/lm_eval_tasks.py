"""Data sets of the paper's Table 4 as tasks of lm-eval: from the hub or from local files.

Prompts, targets and metrics are lm-eval's own definitions. Only the origin of the rows is set here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """lm-eval's definition of a task, and the format of a local copy of its rows."""

    definition: str
    """lm-eval's file, below its folder `tasks`."""
    split: str
    """Split that is evaluated. The local file has the split's name."""
    columns: tuple[str, ...]
    """Columns that prompt and target use."""


SOURCES = {
    "lambada_openai": TaskSource(definition="lambada/lambada_openai.yaml", split="test", columns=("text",)),
    "arc_easy": TaskSource(definition="arc/arc_easy.yaml", split="test", columns=("question", "choices", "answerKey")),
    "sciq": TaskSource(
        definition="sciq/sciq.yaml",
        split="test",
        columns=("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"),
    ),
    "swag": TaskSource(
        definition="swag/swag.yaml",
        split="validation",
        columns=("startphrase", "ending0", "ending1", "ending2", "ending3", "label"),
    ),
}
PAPER_TASKS = tuple(SOURCES)


def load_tasks(names: Sequence[str], data_dir: Path | None) -> dict[str, ConfigurableTask]:
    """Return the named data sets, with rows of `data_dir`/<name>/<split>.jsonl or .parquet, or of the hub without
    `data_dir`.

    Raise ValueError for an unknown name, wrong rows or an unreachable hub, and FileNotFoundError for a missing file.
    """
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"--tasks={name} is unknown; choose from {', '.join(PAPER_TASKS)}")
    if data_dir is None:
        return {name: _hub_task(name) for name in names}
    files = {name: local_files(data_dir, name) for name in names}  # all must exist before the first is read
    return {name: _local_task(name, SOURCES[name], files[name]) for name in names}


def local_files(data_dir: Path, name: str) -> list[Path]:
    """Return the files of a local data set: one .jsonl, one .parquet, or the hub's numbered .parquet parts."""
    folder, split = data_dir / name, SOURCES[name].split
    for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*-of-*.parquet"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise FileNotFoundError(
        f"--data_dir={data_dir} has neither {name}/{split}.jsonl nor {name}/{split}.parquet; put the data set's "
        f"rows there in the hub's schema, or leave {name} out of --tasks"
    )


def _local_task(name: str, source: TaskSource, files: list[Path]) -> ConfigurableTask:
    kind = "parquet" if files[0].suffix == ".parquet" else "json"
    data_files = {source.split: [str(file.resolve()) for file in files]}
    _check_rows(name, source, kind, data_files)
    return _task(
        name,
        source,
        {
            "dataset_path": kind,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": data_files},
            # The definitions declare these splits, but without examples in the prompt nothing is read from them.
            "training_split": None,
            "validation_split": source.split if source.split == "validation" else None,
        },
    )


def _check_rows(name: str, source: TaskSource, kind: str, data_files: dict[str, list[str]]) -> None:
    """Raise ValueError for wrong rows, which lm-eval would report only when it reads the first row. The rows are
    cached, so they are read once."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    first_file = data_files[source.split][0]
    if Path(first_file).stat().st_size == 0:
        raise ValueError(f"{first_file} is empty; put the rows of {name} there, or leave {name} out of --tasks")
    try:
        rows = load_dataset(kind, data_files=data_files, split=source.split)
    except DatasetGenerationError as error:
        raise ValueError(f"{first_file} could not be read as {kind} rows: {error.__cause__ or error}") from error
    if missing_columns := [column for column in source.columns if column not in rows.column_names]:
        raise ValueError(
            f"{first_file} has no {', '.join(missing_columns)} (it has {', '.join(rows.column_names)}); {name} needs "
            f"rows with {', '.join(source.columns)}, as on the hub"
        )


def _hub_task(name: str) -> ConfigurableTask:
    try:
        return _task(name, SOURCES[name], {})
    except (OSError, ValueError) as error:  # ConnectionError is an OSError; datasets raises ValueError when offline
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{name} could not be loaded from the hub: {reason} Pass --data_dir with a local copy, or leave {name} out "
            "of --tasks"
        ) from error


def _task(name: str, source: TaskSource, changes: dict[str, Any]) -> ConfigurableTask:
    """Return lm-eval's definition with `changes`, zero-shot. The task is built directly, because lm-eval's index of all
    tasks takes 5 s."""
    from lm_eval.api.task import ConfigurableTask

    definition = yaml.safe_load((definitions_folder() / source.definition).read_text(encoding="utf-8"))
    return ConfigurableTask(config={**definition, "task": name, "tag": None, "num_fewshot": 0, **changes})


def definitions_folder() -> Path:
    """Return lm-eval's folder of tasks. Raise ValueError if lm-eval is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ValueError("this runner needs lm-eval: pip install 'adacc-hf[eval]'")
    return Path(spec.origin).parent / "tasks"
