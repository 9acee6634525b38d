"""Largest batches on a V100 of 32 GB that the planner predicts, beside Table 3 of the Adacc paper.

    adacc eval table3

The paper does not say how long its sequences are, which stage of ZeRO it uses, or how the 4.7B model is shaped. For
each model the plain column is predicted at several lengths and stages on the node's 8 devices, with attention in single
operators, as frameworks of that time ran it on a V100; the other columns where the plain one lies nearest.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.model_presets import load_config
from adacc_hf.estimate.planning import Request, largest_batches
from adacc_hf.estimate.static_memory import Sharding
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, Status, add_settings, markdown_table

METHODS = ("plain", "full recomputation", "quantization", "adacc")
PAPER = {"gpt2-117m": (57, 136, 98, 136), "gpt2-345m": (8, 61, 19, 61), "gpt2-4.7b": (1, 4, 3, 4)}
"""By model: Table 3's Baseline, Full Recomp., Quantization and Adacc."""
LENGTHS = (512, 1024)
STAGES = (1, 2, 3)
DEVICES = 8
"""GPUs of the paper's node."""
ATTENTION = "eager"

Setup = tuple[str, int, int]
"""A model, a length and a stage of ZeRO."""
Largest = Callable[[Setup, Sequence[str]], Figures]


def main(argv: Sequence[str] | None = None, predicted: Largest | None = None) -> int:
    """Predict every set-up, print the tables and save the record. Returns 1 if one could not be predicted."""
    parser = argparse.ArgumentParser(prog="adacc eval table3", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PAPER, default=list(PAPER), help="which (default: all)")
    add_resume(parser)
    add_settings(parser, "table3")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    largest = predicted or predict
    with open_ledger(settings, {"models": arguments.models}, arguments.resume) as ledger:
        for model in arguments.models:
            for setup in setups(model):
                ledger.measure(_key(setup, "plain"), partial(largest, setup, ["plain"]))
            nearest = nearest_setup(ledger, model)
            ledger.measure(_key(nearest, "all"), partial(largest, nearest, METHODS))
        ledger.finish(paper={model: dict(zip(METHODS, PAPER[model], strict=True)) for model in arguments.models})
        ledger.publish(report_text(ledger))
    return 0 if all(point["status"] == Status.MEASURED.value for point in ledger.points.values()) else 1


def setups(model: str) -> list[Setup]:
    return [(model, length, stage) for length in LENGTHS for stage in STAGES]


def predict(setup: Setup, methods: Sequence[str]) -> Figures:
    """The largest batches of `methods` in one set-up; none fits where training takes more without any activation."""
    model, length, stage = setup
    config = load_config(model)
    workload = Workload(
        config=config,
        device=find_device("v100"),
        precision=PRECISIONS["fp16-amp"],
        attention=ATTENTION,
        sharding=Sharding(method=f"zero{stage}", num_devices=DEVICES),
    )
    request = Request(model=model, workload=workload, batch_size=1, seq_len=length)
    return {"status": Status.MEASURED.value, "batches": largest_batches(request, methods)}


def nearest_setup(ledger: Ledger, model: str) -> Setup:
    """The set-up whose plain batch lies nearest to the paper's, as a ratio; of equal ones that which shards most."""

    def distance(setup: Setup) -> float:
        batch = ledger.points[_key(setup, "plain")]["batches"]["plain"]
        return abs(math.log(max(batch, 0.5) / PAPER[model][0]))

    return min(reversed(setups(model)), key=distance)


def _key(setup: Setup, what: str) -> str:
    model, length, stage = setup
    return f"{model}, {length} tokens, ZeRO {stage}, {what}"


def report_text(ledger: Ledger) -> str:
    """Our largest batches beside the paper's, and the plain ones of all set-ups, as Markdown."""
    models = ledger.run_info["models"]
    rows, plain = [], []
    for model in models:
        nearest = nearest_setup(ledger, model)
        ours = ledger.points[_key(nearest, "all")]["batches"]
        cells = {
            f"{method} (paper)": f"{ours[method]} ({ledger.summary['paper'][model][method]})" for method in METHODS
        }
        rows.append({"model": model, "tokens": str(nearest[1]), "ZeRO": str(nearest[2]), **cells})
        batches = {setup[1:]: ledger.points[_key(setup, "plain")]["batches"]["plain"] for setup in setups(model)}
        found = {f"{length}, ZeRO {stage}": str(batch) for (length, stage), batch in batches.items()}
        plain.append({"plain batches of": model, **found})
    return (
        f"{markdown_table(rows)}\n\nLargest batches per device on a V100 of 32 GB, less 5 % for the CUDA context and "
        f"fragments, as predicted, and the paper's in brackets. Assumed: float16 with DeepSpeed's float32 master "
        f"weights and Adam on {DEVICES} devices, Transformers' GPT-2 with dropout and attention in single operators, a "
        f"4.7B model of 40 layers of width 3072. Length and stage are those whose plain batch is nearest to the "
        f"paper's:\n\n"
        f"{markdown_table(plain)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
