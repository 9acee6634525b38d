"""Accuracy on cloze passages of your own text, in the style of LAMBADA, if LAMBADA cannot be downloaded.

    adacc eval cloze --model runs/demo-none
    adacc eval cloze --model FOLDER --passages cloze.jsonl

recipes/gpt2_pile.py with --cloze_passages saves cloze.jsonl in the run folder, from held-out documents.
recipes/cloze_passages.py creates such a file from any text. A passage counts as correct if the model predicts its last
word greedily, token by token, by lm-eval's definition of LAMBADA.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from adacc_hf.eval.downstream import evaluate
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.tasks.lm_eval_tasks import CLOZE, CLOZE_FILE, cloze_task
from adacc_hf.eval.tasks.task_scores import add_scoring


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the model, print the table and save the record."""
    parser = runner_parser("cloze", __doc__)
    parser.add_argument("--model", required=True, help="checkpoint folder or hub id")
    parser.add_argument("--passages", type=Path, help=f"file of passages (default: {CLOZE_FILE} in --model)")
    add_scoring(parser)
    arguments, settings = parse(parser, argv)
    path = arguments.passages or Path(arguments.model, CLOZE_FILE)
    return evaluate(arguments, settings, {CLOZE: cloze_task(path)})


if __name__ == "__main__":
    sys.exit(main())
