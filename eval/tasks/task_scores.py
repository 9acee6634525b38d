"""Scores of one model on several tasks as points of a record: options, conditions, missing scores, and formatting."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from adacc_hf.eval.records.command_line import positive_int
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.tasks.zero_shot import ModelSource, language_model, score

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

Tasks = Mapping[str, "ConfigurableTask"]


def add_scoring(parser: argparse.ArgumentParser) -> None:
    """Add the options that all runners with tasks share."""
    parser.add_argument("--batch_size", type=positive_int, default=8, help="requests per forward")
    parser.add_argument(
        "--limit",
        type=positive_int,
        help="use only the first rows of each task, for tests; the record notes the limit",
    )


def task_info(tasks: Tasks, limit: int | None) -> dict[str, Any]:
    """Return the conditions of scores other than the model, so that a run with other rows does not continue the
    record."""
    return {
        "tasks": {name: {"version": task.VERSION, "rows_sha256": rows_digest(task)} for name, task in tasks.items()},
        "num_fewshot": 0,
        "limit": limit,
        "lm_eval": version("lm-eval"),
    }


def rows_digest(task: ConfigurableTask) -> str:
    """Return the SHA-256 of the evaluated rows, independent of their origin."""
    digest = hashlib.sha256()
    for row in task.eval_docs:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()


def score_missing(ledger: Ledger, prefix: str, source: ModelSource, tasks: Tasks, limit: int | None) -> None:
    """Measure a point <prefix><task> for every task. The model is loaded only if a point is missing."""
    if all(f"{prefix}{name}" in ledger.points for name in tasks):
        return
    with language_model(source) as model:
        for name, task in tasks.items():
            ledger.measure(f"{prefix}{name}", partial(_point, model, task, limit))


def _point(model: HFLM, task: ConfigurableTask, limit: int | None) -> dict[str, Any]:
    return asdict(score(model, task, limit))


def percent(figures: Mapping[str, Any], column: str = "acc") -> str:
    """Format a share with its standard error, in percent, for a table.

    Example: "39.56 ± 1.00", or "39.56" without a standard error, or "" for a share that the task does not have.
    """
    share, stderr = figures.get(column), figures.get(f"{column}_stderr")
    if share is None:
        return ""
    return f"{100 * share:.2f}" + ("" if stderr is None else f" ± {100 * stderr:.2f}")


def limit_note(limit: int | None) -> str:
    """Return a note that the scores are limited, or "" without a limit."""
    return (
        "" if limit is None else f"LIMITED to the first {limit} rows of each task: not to be compared with whole sets"
    )
