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

    Set torch's number of threads. By default the record's path depends on runner and device. Raise ValueError for a
    missing device, or a clock that does not fit the settings.
    """
    if clock:
        parser.add_argument(
            "--clock",
            choices=tuple(CLOCKS),
            default="wall",
            help="cpu counts CPU time without waiting: for one thread on a CPU that is shared with others",
        )
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
    runner = parser.prog.rpartition(" ")[2].replace("-", "_")
    default = DEFAULT_FOLDER / "DEVICE" / f"{runner}.json"
    parser.add_argument("--output", type=Path, help=f"JSON file to write (default: {default})")
    arguments = parser.parse_args(argv)
    device, threads = arguments.device, arguments.threads
    if threads is None:
        threads = 1 if device == "cpu" else os.cpu_count() or 1
    if threads < 1:
        raise ValueError(f"--threads={threads} must be 1 or more")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda, but torch sees no CUDA device: use --device=cpu")
    if clock and arguments.clock == "cpu" and (threads > 1 or device != "cpu"):
        raise ValueError(
            f"--clock=cpu sums the CPU time of all threads, and does not include other devices: with "
            f"--threads={threads} --device={device} use --clock=wall"
        )
    torch.set_num_threads(threads)
    return arguments, Settings(
        runner=runner,
        seed=arguments.seed,
        threads=threads,
        device=device,
        notes=arguments.notes,
        output=arguments.output or DEFAULT_FOLDER / device / f"{runner}.json",
        until=math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes,
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
