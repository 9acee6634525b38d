"""Options that all runners share, and parsing of a runner's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from adacc_hf.eval.records.clock import add_clock, check_clock
from adacc_hf.eval.records.ledger import add_resume
from adacc_hf.eval.records.records import add_settings, read_settings
from adacc_hf.reports.run_record import Settings


def runner_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `adacc eval NAME`, with the first line of its module's docstring as description."""
    return argparse.ArgumentParser(prog=f"adacc eval {name}", description=(doc or "").partition("\n")[0])


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, clock: bool = False
) -> tuple[argparse.Namespace, Settings]:
    """Add the options that all runners share, and `--clock` if `clock` is set; parse the command line.

    The record is named after the runner. Raise ValueError for a missing device, or a clock that does not fit the
    settings.
    """
    if clock:
        add_clock(parser)
    add_resume(parser)
    add_settings(parser, parser.prog.rpartition(" ")[2].replace("-", "_"))
    arguments = parser.parse_args(argv)
    settings = read_settings(arguments)
    if clock:
        check_clock(arguments.clock, settings)
    return arguments, settings
