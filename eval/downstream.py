"""Zero-shot accuracy on the data sets of the paper's Table 4, by lm-eval.

    adacc eval downstream --model runs/gpt2-117m-adacc

The data sets come from the hub, or with --data_dir from local copies in the hub's schema: lambada_openai/test.jsonl,
arc_easy/test.jsonl, sciq/test.jsonl, swag/validation.jsonl (or .parquet).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.files import read_json, write_json
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, RecordError, open_ledger
from adacc_hf.eval.tasks.lm_eval_tasks import PAPER_TASKS, load_tasks
from adacc_hf.eval.tasks.zero_shot import load_model, score
from adacc_hf.reports.run_record import markdown_table

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask


def main(argv: Sequence[str] | None = None) -> int:
    """Score the model on the tasks that its record does not have yet, print the table and save the record."""
    parser = runner_parser("downstream", __doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument("--tasks", default=",".join(PAPER_TASKS), help="data sets, with commas (default: all four)")
    parser.add_argument("--data_dir", type=Path, help="folder with local copies (default: the hub)")
    parser.add_argument("--batch_size", type=positive_int, default=8, help="requests per forward")
    parser.add_argument(
        "--limit", type=positive_int, help="use only the first rows of each task, for tests; the record notes the limit"
    )
    arguments, settings = parse(parser, argv)
    tasks = load_tasks(arguments.tasks.split(","), arguments.data_dir)
    run_info = {
        "model": arguments.model,
        "weights_sha256": weights_digest(arguments.model),
        "batch_size": arguments.batch_size,
        "tasks": {name: {"version": task.VERSION, "rows_sha256": rows_digest(task)} for name, task in tasks.items()},
        "num_fewshot": 0,
        "limit": arguments.limit,
        "lm_eval": version("lm-eval"),
    }
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        if missing_tasks := {name: task for name, task in tasks.items() if name not in ledger.points}:
            model = load_model(arguments.model, settings.device, arguments.batch_size)
            for name, task in missing_tasks.items():
                ledger.measure(name, partial(score, model, task, arguments.limit))
        accuracies = [ledger.points[name]["acc"] for name in tasks]
        # Equal weights for the tasks, like the paper's "Ave.".
        ledger.finish(average_acc=sum(accuracies) / len(accuracies))
        # As in lm-eval's own files.
        record = read_json(settings.output, RecordError, "record")
        write_json(settings.output, {**record, "results": ledger.points})
        ledger.publish(report_text(ledger))
    return 0


def report_text(ledger: Ledger) -> str:
    """Return the scores as Markdown, one line per task."""
    info = ledger.run_info
    parts = [f"zero-shot accuracy of {info['model']}, %"]
    if info["limit"] is not None:
        parts.append(f"LIMITED to the first {info['limit']} rows of each task: not to be compared with whole sets")
    return "\n\n".join([*parts, markdown_table([_cells(*point) for point in ledger.points.items()])]) + "\n"


def _cells(name: str, figures: Mapping[str, Any]) -> dict[str, str]:
    perplexity = figures["perplexity"]
    rows, all_rows = figures["num_samples"], figures["num_samples_original"]
    return {
        "task": f"{name}, version {figures['version']:g}",
        "accuracy": percent(figures["acc"], figures["acc_stderr"]),
        "per character": percent(figures["acc_norm"]),
        "perplexity": "" if perplexity is None else f"{perplexity:.2f}",
        "rows": str(rows) if rows == all_rows else f"{rows} of {all_rows}",
    }


def percent(share: float | None, stderr: float | None = None) -> str:
    """Format a share with its standard error in percent, for example "39.56 ± 1.00". Return "" for None."""
    if share is None:
        return ""
    return f"{100 * share:.2f}" + ("" if stderr is None else f" ± {100 * stderr:.2f}")


WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "config.json", "tokenizer.json")
_READ_BYTES = 1 << 20


def rows_digest(task: ConfigurableTask) -> str:
    """Return the SHA-256 of the evaluated rows, independent of their origin."""
    rows = [json.dumps(row, sort_keys=True) for row in task.eval_docs]
    return hashlib.sha256("".join(rows).encode()).hexdigest()


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
