"""Run of all runners that need no trained model in sequence, each in its own process and folder.

The scale is the demo's on a CPU, and the paper's GPT-345M on a GPU, most important measurements first.

    adacc eval all
    adacc eval all --device cuda --minutes 9 --report DIR --resume

An interrupted run resumes at the interrupted runner, and within the runner at its last point. With --minutes the run
stops when the time is over, with exit status 3. Points that failed are kept, and are not measured again while --minutes
is set.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from adacc_hf.artifacts.files import read_json
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, RecordError, open_ledger
from adacc_hf.eval.records.records import OUT_OF_TIME, Figures, OutOfTimeError, Status
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.eval.repository.points import points_text, save_points
from adacc_hf.eval.trials.isolation import end_process, failure
from adacc_hf.reports.run_record import markdown_table

CLOCKED = ("throughput", "peers", "longest")
NAMES = (*CLOCKED, "max-batch", "loss", "published")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One call of a runner."""

    runner: str
    part: str = ""
    """Suffix that distinguishes stages of the same runner."""
    options: str = ""

    @property
    def key(self) -> str:
        """Return the stage's key in the record, also the name of its folder and of its own record."""
        return f"{self.runner}-{self.part}" if self.part else self.runner


_GPT = "--preset=gpt2-345m --precision=bf16 --timeout=150"
"""Options for GPT-345M. The timeout keeps a slow point from delaying the other runners. Most points are estimated to
take 40 to 70 seconds."""
_COMPILED = "--preset=gpt2-345m --precision=bf16 --timeout=270 --batch=16"
"""Options for compiled runs. A compilation takes one or two minutes on a GPU. The timeout fits into a slice, and is
below the limit for hanging runners."""
_METHODS = "--methods adacc full adacc_exact quantization"

ON_GPU: tuple[Stage, ...] = (
    Stage(
        runner="peers",
        part="half",
        options=f"{_GPT} --batch=16 --peers plain checkpointing adacc adacc_exact --budgets 0.5 --variant-budgets 0.5",
    ),
    Stage(runner="throughput", part="24GiB", options=f"{_GPT} --limit=24GiB --batches 32 {_METHODS}"),
    Stage(runner="throughput", part="32GiB", options=f"{_GPT} --limit=32GiB --batches 64 {_METHODS}"),
    Stage(
        runner="throughput",
        part="llama",
        # Of the limit, checkpointing takes 27 GiB. Plain training would take 44 GiB.
        options="--preset=llama-1b --precision=bf16 --tokens=2048 --timeout=150 --limit=30GiB --batches 4 "
        "--methods none full adacc adacc_exact",
    ),
    Stage(
        runner="peers",
        options=f"{_GPT} --batch=16 --peers plain checkpointing selective checkpointing_offload adacc adacc_exact "
        "--budgets 0.6 0.35 0.2 --variant-budgets 0.6 0.35 0.2",
    ),
    Stage(runner="throughput", part="more", options=f"{_GPT} --limit=24GiB --batches 16 64 {_METHODS}"),
    Stage(runner="max-batch", options=f"{_GPT} --limit=24GiB --methods adacc full none adacc_exact"),
    Stage(
        runner="longest",
        options="--models=llama --width=1024 --layers=16 --heads=16 --vocabulary=32768 --limit=16GiB "
        "--profiled=16384 --most=1048576 --multiple=1024 --timeout=270",
    ),
    Stage(runner="peers", part="compiled", options=f"{_COMPILED} --peers compile_1 compile_0.5 plain"),
    Stage(
        runner="peers",
        part="compiled-adacc",
        # At a fixed share, only one compilation is needed. Matching a peer's peak takes up to five compilations.
        options=f"{_COMPILED} --peers adacc_compiled --variant-budgets 0.5",
    ),
    Stage(runner="throughput", part="all", options="--preset=gpt2-345m --precision=bf16 --batches 16 64"),
    Stage(runner="loss", options="--preset=gpt2-345m --precision=bf16"),
)
"""Stages that run first on a GPU, in this order. The time on a GPU may end at any point, so the most important
measurements come first. Most of the runners' defaults would leave a GPU idle. Where a limit is set, plain training
exceeds it. With 32 sequences in 24 GiB and 64 in 32 GiB, checkpointing exceeds it too."""

Execute = Callable[[Sequence[str]], int]

POLL_INTERVAL_S = 5.0
"""Interval in seconds between checks for new points of the current runner."""

MOST_SECONDS_WITHOUT_A_POINT = 300.0
"""Time without a new point after which a runner counts as hanging, if the run has a time limit. Without this bound,
a hanging runner would use up all slices."""


def main(argv: Sequence[str] | None = None, execute: Execute | None = None) -> int:
    """Run the missing stages, print and save the results. Return 1 if a stage failed, 3 if the time ended first."""
    parser = runner_parser("all", __doc__)
    parser.add_argument("--runners", nargs="+", choices=NAMES, help="runners, in this order (default: all)")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="after every point, write all results so far into DIR: a text and an archive",
    )
    arguments, settings = parse(parser, argv, clock=True)
    stages = stages_of(settings.device, arguments.runners)
    run_info = {"runners": [stage.key for stage in stages], "clock": arguments.clock}
    # A stage resumes in the next slice, however long it takes: the runners themselves watch the time.
    with open_ledger(replace(settings, until=math.inf), run_info, arguments.resume) as ledger:
        is_over = not run_stages(ledger, stages, settings.until, arguments.report, execute)
        if not is_over:
            ledger.finish()
        ledger.publish(report_text(ledger))
        if arguments.report is not None:
            save_points(settings.output.parent, arguments.report)
            print(f"{points_text(settings.output.parent)}\nsaved in {arguments.report}")
    if is_over:
        return OUT_OF_TIME
    return 0 if all(point["status"] == Status.MEASURED.value for point in ledger.points.values()) else 1


def stages_of(device: str, runners: Sequence[str] | None = None) -> list[Stage]:
    """Return the stages of `runners`, or of all runners, in the order of execution."""
    first = list(ON_GPU) if device == "cuda" else []
    staged_runners = {stage.runner for stage in first}
    rest = [Stage(runner=name) for name in NAMES if name not in staged_runners]
    stages = [*first, *rest]
    if runners is None:
        return stages
    stages_by_runner = [[stage for stage in stages if stage.runner == name] or [Stage(runner=name)] for name in runners]
    return [stage for group in stages_by_runner for stage in group]


def run_stages(
    ledger: Ledger, stages: Sequence[Stage], until: float, report: Path | None, execute: Execute | None
) -> bool:
    """Measure the missing stages. Return True if all are measured before the time is over."""
    for stage in tqdm(stages, desc="all", unit="runner"):
        if until != math.inf and stage.key in ledger.points:
            continue  # skips failed stages too, because the time is for stages that were not tried
        if time.monotonic() >= until:
            return False
        run = execute or partial(_execute, stage, ledger, until, report)
        try:
            ledger.measure(stage.key, partial(measure, ledger, stage, run, until))
        except OutOfTimeError:
            return False
    return True


def measure(ledger: Ledger, stage: Stage, execute: Execute, until: float = math.inf) -> Figures:
    """Run one stage. Return its status and its time in seconds. Raise OutOfTimeError if the stage must resume later."""
    output, name = record_path(ledger, stage.key), stage.runner
    command = ["eval", name, "--output", str(output), *_shared_options(ledger), *stage.options.split()]
    if name in CLOCKED:
        command += ["--clock", ledger.run_info["clock"]]
    if until != math.inf:
        command += ["--resume", f"--minutes={max(0.0, until - time.monotonic()) / 60:.3f}"]
    start = time.perf_counter()
    status = execute(command)
    if status == OUT_OF_TIME:
        raise OutOfTimeError
    figures = {"seconds": time.perf_counter() - start, "record": str(output.relative_to(ledger.settings.output.parent))}
    if status == HANGING:
        reason = f"`adacc {' '.join(command)}` saved no point for {MOST_SECONDS_WITHOUT_A_POINT:g} s"
        return {"status": Status.TIMEOUT.value, "reason": reason, **figures}
    if status != 0:
        reason = f"`adacc {' '.join(command)}` ended with status {status}: see the last lines of its output"
        return {"status": Status.ERROR.value, "reason": reason, **figures}
    try:
        check_record(read_json(output, RecordError, "record"))
    except RecordError as error:
        return {**failure(Status.ERROR, error), **figures}
    return {"status": Status.MEASURED.value, **figures}


def record_path(ledger: Ledger, name: str) -> Path:
    """Return the path of a stage's record. Each stage has its own folder, because runners lock their folders."""
    return ledger.settings.output.parent / name / f"{name.replace('-', '_')}.json"


def _shared_options(ledger: Ledger) -> list[str]:
    settings = ledger.settings
    options = {name: getattr(settings, name) for name in ("seed", "threads", "device", "notes")}
    return [f"--{name}={value}" for name, value in options.items()]


HANGING = -1
"""Status in place of the exit status of a runner that was ended because it saved no point."""


def _execute(stage: Stage, ledger: Ledger, until: float, report: Path | None, command: Sequence[str]) -> int:
    """Run the command until it ends, the time is over, or the command hangs. Save the results after each new point. A
    point that is being measured when the time ends is lost, and measured again in the next slice."""
    output = record_path(ledger, stage.key)
    last_change, since = _modified_ns(output), time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "adacc_hf.cli", *command], start_new_session=True) as process:
        try:
            while True:
                try:
                    return process.wait(min(POLL_INTERVAL_S, max(0.0, until - time.monotonic())))
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= until:
                        return OUT_OF_TIME
                if (now := _modified_ns(output)) != last_change:
                    last_change, since = now, time.monotonic()
                    if report is not None:
                        save_points(ledger.settings.output.parent, report)
                elif until != math.inf and time.monotonic() - since > MOST_SECONDS_WITHOUT_A_POINT:
                    return HANGING
        finally:
            end_process(process)


def _modified_ns(path: Path) -> int | None:
    """Return the file's time of modification in ns, or None if the file does not exist."""
    return path.stat().st_mtime_ns if path.is_file() else None


def report_text(ledger: Ledger) -> str:
    """Return one line per runner, as Markdown."""
    rows = [
        {
            "runner": name,
            "minutes": f"{point['seconds'] / 60:.1f}" if "seconds" in point else "",
            "status": point["status"],
            "record": point.get("record", ""),
        }
        for name, point in ledger.points.items()
    ]
    table = markdown_table(rows) if rows else "No runner has finished yet."
    return "\n\n".join([table, *ledger.reasons()]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
