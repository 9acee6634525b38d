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
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adacc_hf
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import POLICY_FILE, read_json
from adacc_hf.artifacts.policy import Policy
from adacc_hf.eval.downstream import average
from adacc_hf.eval.records.command_line import add_settings, positive_int, read_settings, runner_parser
from adacc_hf.eval.records.ledger import Ledger, RecordError, lock_folder, open_ledger
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


# The paper's own Table 4.


PAPER_METHODS = {
    "none": "Baseline",
    "quantization": "Quantization",
    "adacc": "Adacc",
    "adacc_no_outlier": "Adacc w/o outlier",
}
"""The paper's titles by our method names. The paper has no row for full checkpointing, which changes no gradient."""

PAPER_COLUMNS = ("lambada_openai", "arc_easy", "sciq", "swag", "Ave.")

PAPER_TABLE4: dict[tuple[str, int], dict[str, tuple[float | None, ...]]] = {
    ("117M", 32): {
        "none": (53.46, 39.56, 71.80, 37.46, 50.57),
        "quantization": (2.77, 25.08, None, 24.66, 13.13),
        "adacc": (53.13, 39.1, 70.80, 37.22, 50.06),
        "adacc_no_outlier": (53.03, 39.18, 69.90, 36.98, 49.77),
    },
    ("117M", 64): {
        "none": (54.76, 42.05, 72.60, 38.19, 51.90),
        "quantization": (3.14, 25.08, None, 24.66, 13.22),
        "adacc": (54.82, 41.04, 71.80, 38.09, 51.44),
        "adacc_no_outlier": (54.7, 39.77, 71.80, 38.09, 51.03),
    },
    ("345M", 8): {
        "none": (56.97, 42.85, 72.50, 39.49, 52.95),
        "quantization": (43.1, 25.08, None, 24.66, 23.21),
        "adacc": (56.29, 42.55, 72.70, 39.26, 52.7),
        "adacc_no_outlier": (56.06, 41.79, 71.60, 39.12, 52.14),
    },
    ("345M", 16): {
        "none": (58.06, 44.65, 76.20, 40.88, 54.95),
        "quantization": (50.45, 25.08, None, 24.65, 25.05),
        "adacc": (57.67, 44.53, 76.60, 40.79, 54.90),
        "adacc_no_outlier": (57.32, 43.77, 75.10, 40.17, 54.09),
    },
}
"""Accuracies by model and batch size, in the order of PAPER_COLUMNS. None where the paper prints a dash.

The paper's mean counts a dash as 0.
"""


def paper_figures() -> dict[str, dict[str, dict[str, float | None]]]:
    """Return the paper's table for a record: by model and batch size, by method, by column."""
    return {
        f"{size}, batch {batch}": {
            method: dict(zip(PAPER_COLUMNS, values, strict=True)) for method, values in methods.items()
        }
        for (size, batch), methods in PAPER_TABLE4.items()
    }


def paper_table_text() -> str:
    """Return the paper's table as Markdown."""
    return markdown_table(
        [
            {"paper": f"{size}, batch {batch}, {PAPER_METHODS[method]}"}
            | {
                name: "-" if value is None else f"{value:.2f}"
                for name, value in zip(PAPER_COLUMNS, values, strict=True)
            }
            for (size, batch), methods in PAPER_TABLE4.items()
            for method, values in methods.items()
        ]
    )


# Trainings by the recipe, each in its own process.


class TrainingFailedError(AdaccError):
    """Error of a recipe that ended with an exit status other than 0. The recipe's output has the reason."""


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One call of recipes/gpt2_pile.py."""

    method: str
    folder: Path
    """Run folder. The run resumes from a checkpoint in the folder, so only the same run may write there."""
    options: Sequence[str]
    """All other command-line options."""
    threads: int = 1
    """CPU threads of torch."""

    def train(self) -> dict[str, Any]:
        """Train, and return the figures of the last record. Raise TrainingFailedError if the training fails."""
        checkpoint = last_checkpoint(self.folder)
        command = [sys.executable, str(recipe_path()), "--method", self.method, "--output_dir", str(self.folder)]
        command += ["--report", "false", *self.options]
        command += ["--resume_from_checkpoint", str(checkpoint)] if checkpoint else []
        with lock_folder(self.folder, holder="the training of an earlier run") as lock:
            # The training process inherits the lock. If its parent is killed, no second training can start in the
            # folder.
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
            status = subprocess.run(command, env=environment, pass_fds=[lock], check=False).returncode
        if status != 0:
            raise TrainingFailedError(
                f"{' '.join(command)} ended with status {status}: see the last lines of its output"
            )
        return self._figures(checkpoint)

    def _figures(self, checkpoint: Path | None) -> dict[str, Any]:
        metrics = read_json(self.folder / "all_results.json", RecordError, "training result")
        policy = self.folder / POLICY_FILE
        return {
            "steps": metrics["steps"],
            "final_train_loss": metrics["final_train_loss"],
            "validation_loss": metrics["eval_loss"],
            "gone_on_from": checkpoint.name if checkpoint else None,
            # Actions of the policy at the end of training. A method without a policy saves or recomputes everything.
            "actions": dict(Policy.load(policy).action_counts()) if policy.is_file() else None,
        }


def recipe_path() -> Path:
    """Return the recipe in the source checkout that this package is imported from. Raise ValueError if there is
    none."""
    path = Path(adacc_hf.__file__).resolve().parents[1] / "recipes" / "gpt2_pile.py"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: models are trained by the recipes, which an installed package leaves out; "
            "run from a source checkout (pip install -e .)"
        )
    return path


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest complete checkpoint of a run folder.

    A complete checkpoint has trainer_state.json, written last.
    """
    complete_checkpoints = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(complete_checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


if __name__ == "__main__":
    sys.exit(main())
