"""Zero-shot accuracy on the data sets of the paper's Table 4, by lm-eval.

    adacc eval downstream --model runs/gpt2-117m-adacc

The data sets come from the hub, or with --data_dir from local copies in the hub's schema: lambada_openai/test.jsonl,
arc_easy/test.jsonl, sciq/test.jsonl, swag/validation.jsonl (or .parquet).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adacc_hf.artifacts.files import read_json, write_json
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, RecordError, open_ledger
from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks
from adacc_hf.eval.tasks.task_scores import Tasks, add_scoring, limit_note, percent, score_missing, task_info
from adacc_hf.eval.tasks.zero_shot import ModelSource
from adacc_hf.reports.run_record import Settings, markdown_table


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the model, print the table and save the record."""
    parser = runner_parser("downstream", __doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument("--tasks", default=",".join(PAPER_TASKS), help="data sets, with commas (default: all four)")
    parser.add_argument("--data_dir", type=Path, help="folder with local copies (default: the hub)")
    add_scoring(parser)
    arguments, settings = parse(parser, argv)
    return evaluate(arguments, settings, load_tasks(arguments.tasks.split(","), arguments.data_dir))


def evaluate(arguments: argparse.Namespace, settings: Settings, tasks: Tasks) -> int:
    """Score `--model` on the tasks that its record does not have yet, print the table and save the record."""
    source = ModelSource(model=arguments.model, device=settings.device, batch_size=arguments.batch_size)
    run_info = {
        "model": arguments.model,
        "weights_sha256": weights_digest(arguments.model),
        "batch_size": arguments.batch_size,
        **task_info(tasks, arguments.limit),
    }
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        score_missing(ledger, "", source, tasks, arguments.limit)
        ledger.finish(average_acc=average([ledger.points[name] for name in tasks]))
        save_results(settings.output, ledger.points)
        ledger.publish(report_text(ledger))
    return 0


def average(scores: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean accuracy, with equal weights for the tasks, like the paper's "Ave."."""
    return sum(figures["acc"] for figures in scores) / len(scores)


def save_results(path: Path, results: Mapping[str, Any]) -> None:
    """Add the scores under "results", as in lm-eval's own files."""
    write_json(path, {**read_json(path, RecordError, "record"), "results": results})


def report_text(ledger: Ledger) -> str:
    """Return the scores as Markdown."""
    info = ledger.run_info
    parts = [f"zero-shot accuracy of {info['model']}, %", limit_note(info["limit"]), table_text(ledger.points)]
    return "\n\n".join(filter(None, parts)) + "\n"


def table_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per task."""
    return markdown_table([_cells(name, figures) for name, figures in results.items()])


def _cells(name: str, figures: Mapping[str, Any]) -> dict[str, str]:
    perplexity = figures["perplexity"]
    rows, all_rows = figures["num_samples"], figures["num_samples_original"]
    return {
        "task": f"{name}, version {figures['version']:g}",
        "accuracy": percent(figures),
        "per character": percent(figures, "acc_norm"),
        "perplexity": "" if perplexity is None else f"{perplexity:.2f}",
        "rows": str(rows) if rows == all_rows else f"{rows} of {all_rows}",
    }


WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json")
_READ_BYTES = 1 << 20


def weights_digest(model: str | Path) -> str | None:
    """Return the SHA-256 of the weights, the configuration and the tokenizer of a folder. None for a hub id."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted({path for pattern in WEIGHT_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
