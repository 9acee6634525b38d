"""What codecs lose and what they cost: gradient error, round-trip error and bandwidth, in one record.

    adacc eval codecs
    adacc eval codecs --device cuda --model gpt2-345m llama-7b --dtype bfloat16 --tokens 8192 --compile

`adacc eval gradient-error` and `adacc eval codec-bandwidth` are the two halves, each with a record of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from adacc_hf.eval import codec_bandwidth, gradient_error
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.trials.workload import Workload


def main(argv: Sequence[str] | None = None, workload: Workload = gradient_error.WORKLOAD) -> int:
    """Measure both, print the tables, save them and the record. Returns 1 if a codec could not be timed."""
    parser = runner_parser("codecs", __doc__)
    gradient_error.add_probing(parser)
    codec_bandwidth.add_tensors(parser)
    arguments, settings = parse(parser, argv)
    run_info = gradient_error.probing_info(arguments, workload) | codec_bandwidth.tensors_info(arguments)
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        codec_bandwidth.measure(ledger)
        gradient_error.measure(ledger, workload)
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 1 if codec_bandwidth.failures(ledger) else 0


def report_text(ledger: Ledger) -> str:
    """Both reports as Markdown."""
    return f"{gradient_error.report_text(ledger)}\n{codec_bandwidth.report_text(ledger)}"


if __name__ == "__main__":
    sys.exit(main())
