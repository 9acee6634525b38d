"""Losses and costs of codecs: gradient error, round-trip error and bandwidth, in one record.

adacc eval codecs
adacc eval codecs --only bandwidth --device cuda --model llama-7b --dtype bfloat16 --tokens 8192 --compile
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.repository import codec_bandwidth, gradient_error
from adacc_hf.eval.trials.workload import Workload

BANDWIDTH, GRADIENT = "bandwidth", "gradient"


def main(argv: Sequence[str] | None = None, workload: Workload = gradient_error.WORKLOAD) -> int:
    """Measure both halves, print the tables, save tables and record. Return 1 if a codec could not be timed."""
    parser = runner_parser("codecs", __doc__)
    parser.add_argument("--only", choices=(BANDWIDTH, GRADIENT), help="measure only this half")
    gradient_error.add_probing(parser)
    codec_bandwidth.add_tensors(parser)
    arguments, settings = parse(parser, argv)
    run_info: dict[str, Any] = {}
    if arguments.only != BANDWIDTH:
        run_info |= gradient_error.probing_info(arguments, workload)
    if arguments.only != GRADIENT:
        run_info |= codec_bandwidth.tensors_info(arguments)
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        if arguments.only != GRADIENT:
            codec_bandwidth.measure(ledger)
        if arguments.only != BANDWIDTH:
            gradient_error.measure(ledger, workload)
        ledger.complete(report_text)
    return 1 if codec_bandwidth.failures(ledger) else 0


def report_text(ledger: Ledger) -> str:
    """Return the reports of the measured halves, as Markdown."""
    halves = {"batches": gradient_error.report_text, "samples": codec_bandwidth.report_text}
    return "\n".join(report(ledger) for name, report in halves.items() if name in ledger.run_info)


if __name__ == "__main__":
    sys.exit(main())
