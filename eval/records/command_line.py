"""Options that runners share, and parsing of a runner's command line."""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from adacc_hf.reports.run_record import Settings

DEFAULT_FOLDER = Path("runs/eval")


def runner_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `adacc eval NAME`, whose description is the docstring of its module."""
    return argparse.ArgumentParser(
        prog=f"adacc eval {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, clock: bool = False
) -> tuple[argparse.Namespace, Settings]:
    """Add the options that all runners share, and `--clock` if `clock` is set. Parse the command line.

    The record is named after the runner. Raise ValueError for a missing device, or a clock that does not fit the
    settings.
    """
    if clock:
        parser.add_argument(
            "--clock",
            choices=tuple(CLOCKS),
            default="wall",
            help="cpu counts CPU time without waiting: for one thread on a CPU that is shared with others",
        )
    add_settings(parser, parser.prog.rpartition(" ")[2].replace("-", "_"))
    arguments = parser.parse_args(argv)
    settings = read_settings(arguments)
    if clock:
        check_clock(arguments.clock, settings)
    return arguments, settings


def add_settings(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the shared options of runner `name` to its parser."""
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="keep the points that the record has already; --no-resume measures all again (default: continue an "
        "interrupted record of the same settings)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and dropout")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: 1; on a GPU's host all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time limit: start no point that may take longer than the rest of these minutes, and do not retry failed "
        "points; the same command continues the run",
    )
    parser.add_argument("--notes", default="", help="text for the record, for example the state of the machine")
    default = DEFAULT_FOLDER / "DEVICE" / f"{name}.json"
    parser.add_argument("--output", type=Path, help=f"JSON file to write (default: {default})")
    parser.set_defaults(runner=default.stem, record=f"{name}.json")


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command line, and set torch's number of threads.

    By default the record's path depends on the device, so that records of another device are not overwritten. Raise
    ValueError for a device that this machine does not have.
    """
    options = {name: getattr(arguments, name) for name in Settings.__dataclass_fields__ if name != "until"}
    if options["threads"] is None:
        options["threads"] = 1 if arguments.device == "cpu" else os.cpu_count() or 1
    until = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    output = arguments.output or DEFAULT_FOLDER / arguments.device / arguments.record
    settings = Settings(**options | {"output": output, "until": until})
    if settings.threads < 1:
        raise ValueError(f"--threads={settings.threads} must be 1 or more")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda, but torch sees no CUDA device: use --device=cpu")
    torch.set_num_threads(settings.threads)
    return settings


def check_clock(clock: str, settings: Settings) -> None:
    """Raise ValueError if CPU time cannot replace elapsed time: with several threads, or on a device other than the
    CPU."""
    if clock == "cpu" and (settings.threads > 1 or settings.device != "cpu"):
        raise ValueError(
            f"--clock=cpu sums the CPU time of all threads, and does not include other devices: with "
            f"--threads={settings.threads} --device={settings.device} use --clock=wall"
        )


def positive_int(text: str) -> int:
    """Parse an option as a positive integer. Raise the error that argparse reports for any other string."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


# Clocks for benchmarks: wall time, or CPU time of this process for a machine that other users share.


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": cpu_seconds}
