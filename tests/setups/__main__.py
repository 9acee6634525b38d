"""Train twelve public set-ups, scaled down, under budgets that are fractions of plain training's peak; print a table.

python tests/setups
python tests/setups --setups vit whisper --fractions 0.7 --json runs/setups.json
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "memory_meter"))

from memory_meter import environment

OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def start_metered() -> None:
    """Replace this process by one with the memory meter preloaded."""
    settings = environment() | OFFLINE
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
    del os.environ["LD_PRELOAD"]


def main() -> None:
    start_metered()
    warnings.filterwarnings("ignore")
    from measure import train_in_child  # imports torch, which the meter has to precede
    from setups import SETUPS
    from table import cells, figures, heading, line

    parser = argparse.ArgumentParser(prog="python tests/setups", description=__doc__.partition("\n")[0])
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), metavar="NAME")
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.9, 0.7, 0.55], help="budgets / plain's peak")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=128, help="hidden size of the models")
    parser.add_argument("--limit", action="store_true", help="refuse memory above the budget, as a full device does")
    parser.add_argument("--json", type=Path, help="file for all figures and log lines of all runs")
    options = parser.parse_args()
    results = {}
    print(heading(), flush=True)
    for name in options.setups:
        run = (name, options.width, options.steps)
        plain = train_in_child(*run, budget=None, checkpointing=False)
        checkpoint = train_in_child(*run, budget=None, checkpointing=True)
        results[name] = {"plain": plain, "checkpoint": checkpoint, "budgets": {}}
        errors = [base["error"] for base in (plain, checkpoint) if base["error"] is not None]
        if errors:
            print(line([name, f"FAILED without the callback: {errors[0]}"]), flush=True)
            continue
        for fraction in options.fractions:
            budget = int(fraction * max(plain["peaks"]))
            adacc = train_in_child(*run, budget=budget, checkpointing=False, limit=options.limit)
            compared = figures(plain, checkpoint, adacc, budget)
            results[name]["budgets"][fraction] = {"budget": budget, "figures": compared, **adacc}
            print(line(cells(name, fraction, plain, checkpoint, adacc, budget)), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main()
