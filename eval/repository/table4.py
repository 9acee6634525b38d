"""Train a model by each of the paper's methods and evaluate all of them: the paper's Table 4.

    adacc eval table4 --preset demo
    adacc eval table4 --preset gpt2-117m --dataset pile --tokenizer gpt2 --bf16 \\
        --per_device_train_batch_size 32 --memory_budget 12GiB

Options that are not listed here go to recipes/gpt2_pile.py, which trains every method in its own process. So a method's
memory is freed with its process, and this folder imports nothing from recipes/. An interrupted run resumes where it
stopped, also within a training if the training had saved a checkpoint (--save_steps).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adacc_hf.eval.downstream import average
from adacc_hf.eval.records.command_line import add_settings, positive_int, read_settings, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.repository.paper_table4 import paper_figures, paper_table_text
from adacc_hf.eval.repository.recipe_runs import RecipeRun, TrainingFailedError, recipe_path
from adacc_hf.eval.tasks.lm_eval_tasks import CLOZE, CLOZE_FILE, PAPER_TASKS, cloze_task, load_tasks
from adacc_hf.eval.tasks.task_scores import Tasks, add_scoring, limit_note, percent, score_missing, task_info
from adacc_hf.eval.tasks.zero_shot import ModelSource
from adacc_hf.reports.run_record import Settings, markdown_table, meta_info

METHODS = {
    "none": "plain",
    "full": "full checkpointing",
    "quantization": "naive quantization",
    "adacc": "Adacc",
    "adacc_no_outlier": "Adacc w/o outlier",
}
NUM_PASSAGES = 500
TRAINING = "training"


def main(argv: Sequence[str] | None = None) -> int:
    """Train and evaluate the missing points, print the table, save table and record. Return 1 if a training failed."""
    arguments, options = _parser().parse_known_args(argv)
    methods = _parse_names(arguments.methods, METHODS, "--methods")
    names = _parse_names(arguments.tasks or _default_tasks(arguments.preset), (*PAPER_TASKS, CLOZE), "--tasks")
    settings = read_settings(arguments)
    recipe_path()
    tasks = load_tasks([name for name in names if name != CLOZE], arguments.data_dir)
    options = [*_recipe_options(arguments, settings), *options]
    run_info = {
        "preset": arguments.preset,
        "recipe_options": options,
        "cloze": CLOZE in names,
        "batch_size": arguments.batch_size,
        **task_info(tasks, arguments.limit),
    }
    runs = _runs(methods, options, settings)
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for run in runs:
            if arguments.resume is False:
                shutil.rmtree(run.folder, ignore_errors=True)
            _train_and_score(ledger, run, tasks, arguments)
        ledger.complete(report_text, paper=paper_figures())
    return 1 if _failures(ledger.points) else 0


def _parser() -> argparse.ArgumentParser:
    parser = runner_parser("table4", __doc__)
    parser.allow_abbrev = False  # else an option of the recipe could match as a prefix of an option here
    parser.add_argument("--preset", default="demo", help="model preset, or hub id or folder of a config")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods, with commas (default: all)")
    parser.add_argument(
        "--tasks",
        help=f"data sets, with commas: {', '.join(PAPER_TASKS)}, and {CLOZE}, passages of the run's own held-out text "
        f"(default: all; for the demo, which is too small for the others, {CLOZE})",
    )
    parser.add_argument("--data_dir", type=Path, help="folder with local copies of the data sets (default: the hub)")
    parser.add_argument("--num_passages", type=positive_int, default=NUM_PASSAGES, help="cloze passages")
    add_scoring(parser)
    add_settings(parser, "table4/table4")
    return parser


def _default_tasks(preset: str) -> str:
    return CLOZE if preset == "demo" else ",".join((*PAPER_TASKS, CLOZE))


def _parse_names(text: str, allowed: Sequence[str] | Mapping[str, str], option: str) -> list[str]:
    """Split the comma-separated names. Raise ValueError for an unknown name."""
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise ValueError(f"{option}={name} is unknown; choose from {', '.join(allowed)}")
    return names


def _recipe_options(arguments: argparse.Namespace, settings: Settings) -> list[str]:
    """Return the recipe's options that this runner's options imply."""
    options = {
        "model": arguments.preset,
        "seed": settings.seed,
        "cloze_passages": arguments.num_passages,
        "use_cpu": settings.device == "cpu",
    }
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def _runs(methods: Sequence[str], options: Sequence[str], settings: Settings) -> list[RecipeRun]:
    """Return the trainings. Each has a folder next to the record, named by a hash of options, code and versions.

    A checkpoint in this folder thus belongs to the same run.
    """
    meta = meta_info(settings)
    key = repr([*options, meta["commit"], meta["versions"], meta["device"]])
    suffix = hashlib.sha256(key.encode()).hexdigest()[:8]
    folder = settings.output.parent
    return [
        RecipeRun(method=name, folder=folder / f"{name}-{suffix}", options=options, threads=settings.threads)
        for name in methods
    ]


def _train_and_score(ledger: Ledger, run: RecipeRun, tasks: Tasks, arguments: argparse.Namespace) -> None:
    """Measure the points of one method: <method>/training and <method>/<task>."""

    def train() -> dict[str, Any]:
        try:
            return {"status": "measured", "folder": run.folder.name, **run.train()}
        except TrainingFailedError as error:
            return {"status": "error", "reason": str(error)}

    print(f"\n{METHODS[run.method]}: training into {run.folder}", flush=True)
    if ledger.measure(f"{run.method}/{TRAINING}", train)["status"] == "error":
        return
    if ledger.run_info["cloze"]:
        tasks = {**tasks, CLOZE: cloze_task(run.folder / CLOZE_FILE)}
    source = ModelSource(model=run.folder, device=arguments.device, batch_size=arguments.batch_size)
    score_missing(ledger, f"{run.method}/", source, tasks, arguments.limit)


def report_text(ledger: Ledger) -> str:
    """Return our table as Markdown, followed by the paper's."""
    info = ledger.run_info
    names = [*info["tasks"], *([CLOZE] if info["cloze"] else [])]
    heading = f"{info['preset']}, {' '.join(info['recipe_options'])}: accuracy, %"
    table = table_text(ledger.points, names)
    parts = [heading, limit_note(info["limit"]), table, *_failures(ledger.points), paper_table_text()]
    return "\n\n".join(filter(None, parts)) + "\n"


def table_text(points: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> str:
    """Return one line per method that has a score on all `tasks`."""
    rows = [_cells(method, points, tasks) for method in METHODS if all(f"{method}/{task}" in points for task in tasks)]
    return markdown_table(rows) if rows else "no method was trained"


def _cells(method: str, points: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> dict[str, str]:
    scores = {task: points[f"{method}/{task}"] for task in tasks}
    paper_task_scores = [scores[task] for task in PAPER_TASKS if task in scores]
    cells = {"method": METHODS[method]}
    cells |= {task: percent(figures) for task, figures in scores.items()}
    if len(paper_task_scores) == len(PAPER_TASKS):
        cells["Ave."] = f"{100 * average(paper_task_scores):.2f}"
    if CLOZE in scores:
        perplexity = scores[CLOZE]["perplexity"]
        cells["cloze perplexity"] = "not finite" if perplexity is None else f"{perplexity:.1f}"
    training = points[f"{method}/{TRAINING}"]
    cells["validation loss"] = f"{training['validation_loss']:.4f}"
    actions = training["actions"] or {}
    cells["actions"] = ", ".join(f"{count} {action}" for action, count in sorted(actions.items()))
    return cells


def _failures(points: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line per method whose training failed."""
    return [f"{name}: {figures['reason']}" for name, figures in points.items() if figures.get("status") == "error"]


if __name__ == "__main__":
    sys.exit(main())
