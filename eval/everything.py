"""Every runner, one after the other, each in a process and a folder of its own.

On a CPU at the demo's scale; on a GPU at that of the paper's GPT-345M, what only a GPU tells first.

    adacc eval all
    adacc eval all --device cuda --threads 8 --publish eval/results/my-gpu

What was cut short goes on where it stopped: with the runner that was under way, and in it at its last point.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from adacc_hf.artifacts.files import read_json
from adacc_hf.eval.records.ledger import Ledger, RecordError, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table
from adacc_hf.eval.records.schemas import check_record, need_jsonschema
from adacc_hf.eval.trials.clock import add_clock, check_clock

CLOCKED = (
    "throughput",
    "peers",
    "compiled",
    "ablation",
    "solver",
    "executor-bench",
    "budget-bench",
    "evolution",
    "tracking-cost",
    "lengths",
    "compact",
    "compact-tuning",
)
UNCLOCKED = (
    "max-batch", "loss", "codecs", "peak-accuracy", "sizes", "budget-sweep", "table1", "plan", "partitions", "table4",
    "compact-training",
)  # fmt: skip
SCORED = ("cloze", "downstream")
"""Need a trained model, which table4 leaves."""

NAMES = (*CLOCKED, *UNCLOCKED, *SCORED)

FIRST_ON_GPU = ("throughput", "codecs", "table1", "executor-bench", "ablation", "peers", "max-batch", "peak-accuracy")
"""In the order in which they are run there, before the others: the time on a GPU may end at any point."""

_GPT_345M = ("--preset=gpt2-345m", "--precision=bf16")
ON_GPU: dict[str, tuple[str, ...]] = {
    "throughput": (*_GPT_345M, "--batches", "16", "64"),
    "codecs": ("--model=gpt2-345m", "--dtype=bfloat16", "--tokens=8192"),
    "ablation": (*_GPT_345M, "--batch=16"),
    "peers": (*_GPT_345M, "--batch=16"),
    "max-batch": _GPT_345M,
    "loss": _GPT_345M,
}
"""The options of runners whose defaults leave a GPU idle. Plain training fits in 80 GB with the smaller batch only."""

SAMPLE_ROWS = Path(__file__).parent / "sample_rows"
"""A few rows of our own in the schema of Table 4's data sets: enough to see downstream work, not to rank models."""

Execute = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None, execute: Execute | None = None) -> int:
    """Run what is missing, print and save what came of each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="adacc eval all", description=__doc__.partition("\n")[0])
    parser.add_argument("--runners", nargs="+", choices=NAMES, help="which, in this order (default: all)")
    parser.add_argument(
        "--data_dir", type=Path, default=SAMPLE_ROWS, help="data sets for downstream (default: a few sample rows)"
    )
    parser.add_argument("--publish", type=Path, metavar="DIR", help="also copy records, tables and plots into DIR")
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "all")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    need_jsonschema()
    runners = arguments.runners or default_order(settings.device)
    run_info = {"runners": runners, "clock": arguments.clock, "data_dir": str(arguments.data_dir)}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name in tqdm(runners, desc="all", unit="runner"):
            ledger.measure(name, partial(measure, ledger, name, execute or _execute))
        ledger.finish()
        if arguments.publish is not None:
            publish(ledger, arguments.publish)
        ledger.publish(report_text(ledger))
    return 0 if all(point["status"] == Status.MEASURED.value for point in ledger.points.values()) else 1


def default_order(device: str) -> list[str]:
    """All runners in the order in which they are wanted."""
    first = FIRST_ON_GPU if device == "cuda" else ()
    return [*first, *(name for name in NAMES if name not in first)]


def measure(ledger: Ledger, name: str, execute: Execute) -> Figures:
    """How one runner ended, and after how long."""
    output = record_path(ledger, name)
    command = ["eval", name, "--output", str(output), *_shared_options(ledger)]
    if ledger.settings.device == "cuda":
        command += ON_GPU.get(name, ())
    if name in CLOCKED:
        command += ["--clock", ledger.run_info["clock"]]
    if name in SCORED:
        model = trained_model(ledger)
        if model is None:
            return {"status": Status.ERROR.value, "reason": "needs the model that table4 trains: run it before"}
        command += ["--model", str(model)]
    if name == "downstream":
        command += ["--data_dir", ledger.run_info["data_dir"]]
    start = time.perf_counter()
    status = execute(command)
    figures = {"seconds": time.perf_counter() - start, "record": str(output.relative_to(ledger.settings.output.parent))}
    if status != 0:
        reason = f"`adacc {' '.join(command)}` ended with status {status}; its last lines say why"
        return {"status": Status.ERROR.value, "reason": reason, **figures}
    check_record(read_json(output, RecordError, "record"))
    return {"status": Status.MEASURED.value, **figures}


def record_path(ledger: Ledger, name: str) -> Path:
    """Where a runner's record lies: in a folder of its own, because runners lock theirs."""
    return ledger.settings.output.parent / name / f"{name.replace('-', '_')}.json"


def _shared_options(ledger: Ledger) -> list[str]:
    settings = ledger.settings
    options = {name: getattr(settings, name) for name in ("seed", "threads", "device", "notes")}
    return [f"--{name}={value}" for name, value in options.items()]


def trained_model(ledger: Ledger) -> Path | None:
    """The folder of the model that table4 trained plainly; None if it has not."""
    path = record_path(ledger, "table4")
    if not path.is_file():
        return None
    training = Ledger.load(path).points.get("none/training", {})
    return path.parent / training["folder"] if "folder" in training else None


def _execute(command: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "adacc_hf.cli", *command], check=False).returncode


def publish(ledger: Ledger, folder: Path) -> None:
    """Copy what each runner that succeeded left: record, table and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, point in ledger.points.items():
        if point["status"] == Status.MEASURED.value:
            path = record_path(ledger, name)
            for file in (path.with_suffix(suffix) for suffix in (".json", ".md", ".svg")):
                if file.is_file():
                    shutil.copy(file, folder)


def report_text(ledger: Ledger) -> str:
    """One line per runner, as Markdown."""
    rows = [
        {
            "runner": name,
            "minutes": f"{point['seconds'] / 60:.1f}" if "seconds" in point else "",
            "status": point["status"],
            "record": point.get("record", ""),
        }
        for name, point in ledger.points.items()
    ]
    failed = [f"{name}: {point['reason']}" for name, point in ledger.points.items() if "reason" in point]
    return "\n\n".join([markdown_table(rows), *failed]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
