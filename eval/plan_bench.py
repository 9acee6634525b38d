"""What `adacc plan` says of published models, and what asking takes: seconds and memory on this machine.

    adacc eval plan

Each plan is a process of its own, that starts Python, traces the model without weights and looks for the largest batch
and the longest sequence. CPU seconds hold on a machine with other work; wall seconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table

CASES = {
    "GPT-117M": "--model gpt2-117m --batch-size 16 --dtype fp16-amp --device v100",
    "GPT-345M": "--model gpt2-345m --batch-size 16 --dtype fp16-amp --device v100",
    "GPT-4.7B": "--model gpt2-4.7b --batch-size 8 --device h200",
    "LLaMA-3-8B": "--model llama3-8b --batch-size 4 --device h100 --fsdp 8",
    "LLaMA-3-70B": "--model llama3-70b --batch-size 1 --device h200 --fsdp 64",
    "T5-11B": "--model t5-11b --batch-size 8 --seq-len 512 --device h200 --fsdp 8",
}
"""By name: the options of `adacc plan`."""

ASKED_SECONDS, ASKED_BYTES = 60, 8 * 2**30
"""What a plan may take."""


def main(argv: Sequence[str] | None = None, measure: Callable[[str], Figures] | None = None) -> int:
    """Plan every case, print the table and save the record. Returns 1 if a plan was refused."""
    parser = argparse.ArgumentParser(prog="adacc eval plan", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which models (default: all)")
    add_resume(parser)
    add_settings(parser, "plan")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    run_info = {"cases": {name: CASES[name] for name in arguments.cases}}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name, options in run_info["cases"].items():
            ledger.measure(name, partial(measure or run_plan, options))
        ledger.finish(asked_seconds=ASKED_SECONDS, asked_bytes=ASKED_BYTES)
        ledger.publish(report_text(ledger))
    return 0 if all(point["status"] == Status.MEASURED.value for point in ledger.points.values()) else 1


def run_plan(options: str) -> Figures:
    """What one plan says and took; it runs with one thread."""
    command = [sys.executable, "-m", "adacc_hf.cli", "plan", "--json", *options.split()]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return {"status": Status.ERROR.value, "reason": f"adacc plan {options} ended with {process.returncode}"}
    record = json.loads(printed)
    return {
        "status": Status.MEASURED.value,
        "wall_seconds": time.perf_counter() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "fits": record["fits"],
        "budget_bytes": record["budget_bytes"],
        "methods": record["methods"],
    }


def report_text(ledger: Ledger) -> str:
    """One line per model as Markdown."""
    table = markdown_table([_row(name, point) for name, point in ledger.points.items()])
    return (
        f"{table}\n\nAsked for: below {ASKED_SECONDS} s and {format_bytes(ASKED_BYTES)} of memory for each plan. "
        f"Largest batches and times of a step are forecasts of a roofline, not measured.\n"
    )


_COLUMNS = (
    "CPU s",
    "wall s",
    "memory",
    "fits",
    "largest batch (plain, full rec., adacc)",
    "step against full rec.",
)


def _row(name: str, point: Figures) -> dict[str, str]:
    if point["status"] != Status.MEASURED.value:
        return {"model": f"{name}: {point['reason']}", **dict.fromkeys(_COLUMNS, "-")}
    adacc, full = point["methods"]["adacc"], point["methods"]["full recomputation"]
    ratio = "-" if adacc["step_ms"] is None else f"{adacc['step_ms'] / full['step_ms']:.3f}"
    batches = [str(point["methods"][method]["largest_batch"]) for method in ("plain", "full recomputation", "adacc")]
    cells = (
        f"{point['cpu_seconds']:.1f}",
        f"{point['wall_seconds']:.1f}",
        format_bytes(point["peak_rss_bytes"]),
        "yes" if point["fits"] else "no",
        ", ".join(batches),
        ratio,
    )
    return {"model": name, **dict(zip(_COLUMNS, cells, strict=True))}


if __name__ == "__main__":
    sys.exit(main())
