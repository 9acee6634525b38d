"""Train small models in processes whose allocator fails above the budget, and print a table.

python tests/limited                       # all models, ten budgets each
python tests/limited --models gpt2 vit --budgets 3 --samples 1 2 4
"""

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
METER = HERE.parent / "memory_meter"
MODELS = ("gpt2", "llama", "t5", "vit")
SMALLEST_BUDGET = 1.02
"""Smallest budget, as a multiple of the smallest feasible budget."""


def train(model: str, *options: str, limit: int | None = None) -> dict[str, Any]:
    """Run a training process. Return its record, or its error, and the number of allocations that the limit refused."""
    limit_options = [] if limit is None else ["--limit", str(limit)]
    command = [sys.executable, str(METER), *limit_options, str(HERE / "train.py"), model, *options]
    process = subprocess.run(command, capture_output=True, text=True)
    refusals = int(process.stderr.rpartition(" refusals")[0].rpartition(" ")[2])
    failed = process.returncode != 0
    record = {"error": process.stderr[-2000:]} if failed else json.loads(process.stdout.splitlines()[-1])
    return {**record, "refusals": refusals}


def budgets_of(model: str, options: list[str], number: int) -> list[int]:
    """Return budgets from just above the smallest feasible one to plain training's peak, in a geometric sequence."""
    floor = train(model, "--budget", "65536", *options)["floor"]
    floor = train(model, "--budget", str(floor), *options).get(
        "floor", floor
    )  # after a step, with the optimizer's state
    largest = max(train(model, *(option for option in options if option != "--codecs"))["peaks"].values())
    smallest = SMALLEST_BUDGET * floor
    return [int(smallest * (largest / smallest) ** (index / max(1, number - 1))) for index in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/limited", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--budgets", type=int, default=10, help="number of budgets per model")
    parser.add_argument("--actions", nargs="+", choices=("lossless", "codecs"), default=("lossless", "codecs"))
    parser.add_argument("--samples", type=int, nargs="+", default=(8,), help="batch sizes")
    options = parser.parse_args()
    num_failed = 0
    for model, samples, actions in product(options.models, options.samples, options.actions):
        train_options = ["--samples", str(samples), *(["--codecs"] if actions == "codecs" else [])]
        for budget in budgets_of(model, train_options, options.budgets):
            record = train(model, "--budget", str(budget), *train_options, limit=budget)
            is_trained = "error" not in record and "floor" not in record
            num_failed += not is_trained
            peaks = {phase: round(peak / 2**20, 2) for phase, peak in record.get("peaks", {}).items()}
            outcome = f"{'trained' if is_trained else 'FAILED'} ({record['refusals']} refusals)"
            print(f"{model:6} {samples} {actions:9} {budget / 2**20:8.2f} MiB  {outcome}  {peaks}", flush=True)
            if not is_trained:
                print(record.get("error") or f"the budget is below {record['floor']} bytes", flush=True)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
