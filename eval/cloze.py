"""Accuracy on cloze passages of one's own text: LAMBADA's question where LAMBADA cannot be downloaded.

    adacc eval cloze --model runs/demo-none
    adacc eval cloze --model FOLDER --documents held_out.jsonl

The recipes leave cloze.jsonl in the run folder when --cloze_passages asks for it, made of documents that they hold out.
With --documents the passages are made here; take documents that the model was not trained on. A passage counts if its
last word is what the model predicts greedily, token by token, by lm-eval's definition of LAMBADA.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from adacc_hf.eval.downstream import evaluate
from adacc_hf.eval.records.records import output_path, positive_int
from adacc_hf.eval.tasks.cloze_passages import CLOZE_FILE, cloze_passages, save_passages
from adacc_hf.eval.tasks.lm_eval_tasks import CLOZE, cloze_task
from adacc_hf.eval.tasks.task_scores import add_scoring

NUM_PASSAGES = 500
"""The standard error of an accuracy is then 2.2 points at most."""


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print the table and save the record."""
    parser = argparse.ArgumentParser(
        prog="adacc eval cloze", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument(
        "--passages",
        type=Path,
        help=f"passages to ask (default: {CLOZE_FILE} in --model; with --documents beside --output)",
    )
    parser.add_argument(
        "--documents", type=Path, help='make --passages of this file first: {"text": ...} per line, one document each'
    )
    parser.add_argument(
        "--num_passages", type=positive_int, default=NUM_PASSAGES, help="passages that --documents make"
    )
    add_scoring(parser, "cloze")
    arguments = parser.parse_args(argv)
    made_here = arguments.documents is not None
    default = output_path(arguments).with_suffix(".jsonl") if made_here else Path(arguments.model, CLOZE_FILE)
    path = arguments.passages or default
    if made_here:
        save_passages(cloze_passages(read_documents(arguments.documents), arguments.num_passages), path)
    return evaluate(arguments, {CLOZE: cloze_task(path)})


def read_documents(path: Path) -> Iterator[str]:
    """The "text" of each line of a JSON Lines file. Raises ValueError that names the line without one."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
            except (json.JSONDecodeError, TypeError, KeyError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f'--documents={path}, line {number} is not {{"text": "..."}}; mend that line')
            yield text


if __name__ == "__main__":
    sys.exit(main())
