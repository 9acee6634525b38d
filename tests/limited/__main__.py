"""Trains small models in processes whose allocator refuses what goes above the budget, and prints a table.

python tests/limited                       # all models, ten budgets each
python tests/limited --models gpt2 vit --budgets 3 --samples 1 2 4
"""

from __future__ import annotations

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
LEAST = 1.02
"""The smallest budget, in floors."""


def train(model: str, *options: str, limit: int | None = None) -> dict[str, Any]:
    """What a training process printed, with whether its allocator refused anything; of one that failed the latter."""
    limited = [] if limit is None else ["--limit", str(limit)]
    command = [sys.executable, str(METER), *limited, str(HERE / "train.py"), model, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    refusals = int(done.stderr.rpartition(" refusals")[0].rpartition(" ")[2])
    printed = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-2000:]}
    return {**printed, "refusals": refusals}


def budgets_of(model: str, options: list[str], number: int) -> list[int]:
    """Budgets from just above the floor to the peak of plain training, a constant ratio apart."""
    floor = train(model, "--budget", "65536", *options)["floor"]
    most = max(train(model, *(option for option in options if option != "--codecs"))["peaks"].values())
    least = LEAST * floor
    return [int(least * (most / least) ** (place / max(1, number - 1))) for place in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/limited", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--budgets", type=int, default=10, help="how many per model")
    parser.add_argument("--actions", nargs="+", choices=("lossless", "codecs"), default=("lossless", "codecs"))
    parser.add_argument("--samples", type=int, nargs="+", default=(8,), help="in a batch")
    options = parser.parse_args()
    num_failed = 0
    for model, samples, actions in product(options.models, options.samples, options.actions):
        given = ["--samples", str(samples), *(["--codecs"] if actions == "codecs" else [])]
        for budget in budgets_of(model, given, options.budgets):
            found = train(model, "--budget", str(budget), *given, limit=budget)
            ended = "error" not in found and "floor" not in found
            num_failed += not ended
            peaks = {phase: round(peak / 2**20, 2) for phase, peak in found.get("peaks", {}).items()}
            outcome = f"{'trained' if ended else 'FAILED'} ({found['refusals']} refusals)"
            print(f"{model:6} {samples} {actions:9} {budget / 2**20:8.2f} MiB  {outcome}  {peaks}", flush=True)
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
