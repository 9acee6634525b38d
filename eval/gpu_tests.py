"""Run of the source checkout's GPU tests, file by file: numbers of passed and failed tests, and the end of the output.

    adacc eval gpu-tests --device cuda

A file that takes longer than --timeout seconds is ended; the outcomes of its tests until then are kept.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

import adacc_hf
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, open_ledger
from adacc_hf.eval.records.records import Figures, Status, positive_int
from adacc_hf.reports.run_record import markdown_table

FILES = (
    "tests/adacc_hf/test_gpu.py",
    "tests/kernels/test_gpu.py",
    "tests/callbacks/test_gpu.py",
    "tests/eval/trials/test_trial.py",
    "tests/eval/trials/test_contenders.py",
    "tests/callbacks/test_step_retry.py",
    "tests/kernels/test_triton.py",
    "tests/adacc_hf/compiler/test_partitioner.py",
)
"""Files with tests marked gpu, the most important first."""

MOST_WORKERS = 6
"""Most processes for one file's tests. Each has a CUDA context of half a GiB, and compiles its own kernels."""

KEPT_OUTPUT_CHARACTERS = 6000
"""Characters of the output that are kept if a test failed."""

_OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_TEST = re.compile(r"\btests/\S+::\S+")

Execute = Callable[[str, float], tuple[int | None, str]]


def main(argv: Sequence[str] | None = None, execute: Execute | None = None) -> int:
    """Run the files, print the table, save record and table. Return 1 if a test failed, or if a file has no tests."""
    parser = runner_parser("gpu-tests", __doc__)
    parser.add_argument(
        "--files", nargs="+", choices=FILES, default=list(FILES), help="files, in this order (default: all)"
    )
    parser.add_argument("--timeout", type=positive_int, default=600, help="time limit of one file in seconds")
    arguments, settings = parse(parser, argv)
    if settings.device != "cuda":
        raise ValueError(f"--device={settings.device} has no GPU tests: use --device=cuda")
    if not (root() / FILES[0]).is_file():
        raise ValueError(f"{root()} has no tests/: run this from a source checkout")
    with open_ledger(settings, {"files": arguments.files}, arguments.resume) as ledger:
        for file in tqdm(arguments.files, desc="gpu-tests", unit="file"):
            ledger.measure(file, partial(measure, file, arguments.timeout, execute or _pytest))
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0 if all(point["status"] == Status.MEASURED.value for point in ledger.points.values()) else 1


def root() -> Path:
    """Return the root of the checkout that this package runs from."""
    return Path(adacc_hf.__file__).resolve().parents[1]


def measure(file: str, timeout_s: float, execute: Execute) -> Figures:
    """Run the tests of `file`. Return the number of passed tests, the failed ones, and on failure the end of the
    output."""
    start = time.perf_counter()
    code, output = execute(file, timeout_s)
    outcomes = outcomes_of(output)
    failed = sorted(name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR", "XPASS"))
    figures: Figures = {
        "passed": sum(outcome == "PASSED" for outcome in outcomes.values()),
        "skipped": sum(outcome in ("SKIPPED", "XFAIL") for outcome in outcomes.values()),
        "failed": failed,
        "seconds": time.perf_counter() - start,
    }
    if code == 0:
        return {"status": Status.MEASURED.value, **figures}
    status = Status.TIMEOUT if code is None else Status.ERROR
    return {"status": status.value, "reason": output[-KEPT_OUTPUT_CHARACTERS:], **figures}


def outcomes_of(output: str) -> dict[str, str]:
    """Return each test's outcome, parsed from the output of `pytest -v`, with one or several processes."""
    outcomes: dict[str, str] = {}
    for line in output.splitlines():
        outcome, test = _OUTCOME.search(line), _TEST.search(line)
        # A summary at the end lists the failed tests again, with their reason.
        if outcome and test:
            outcomes.setdefault(test.group(), outcome.group())
    return outcomes


def _pytest(file: str, timeout_s: float) -> tuple[int | None, str]:
    """Run pytest. Return the exit status, None after `timeout_s` seconds, and the output."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", file]
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2)
    environment = dict(os.environ)
    if workers > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
        environment.setdefault("OMP_NUM_THREADS", "2")  # threads of several processes on the same cores slow each other
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            completed_process = subprocess.run(
                command, cwd=root(), stdout=output, stderr=output, timeout=timeout_s, check=False, env=environment
            )
            code = completed_process.returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        return code, output.read()


def report_text(ledger: Ledger) -> str:
    """Return one line per file, as Markdown, and the failed tests."""
    rows = [
        {
            "file": file,
            "passed": str(point["passed"]),
            "failed": str(len(point["failed"])),
            "skipped": str(point["skipped"]),
            "seconds": f"{point['seconds']:.0f}",
            "status": point["status"],
        }
        for file, point in ledger.points.items()
    ]
    failed = [f"- {name}" for point in ledger.points.values() for name in point["failed"]]
    return "\n\n".join([markdown_table(rows), *(["Failed:", "\n".join(failed)] if failed else [])]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
