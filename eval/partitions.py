"""What the partitioner does to compiled graphs: bits, bytes and costs, for many architectures.

    adacc eval partitions

Each model trains one step through graphs that torch's own partitioner cut, and one through ours at each of some shares
of the bytes that those hand over. Lossless choices must give the same bits, stored bytes must be what was predicted,
and a smaller share must never promise to be faster; anything else makes the run fail. The graphs run operator by
operator: Inductor's fusion, which orders sums as it likes, has no part in this.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from tqdm import tqdm

from adacc_hf.compiler import AdaccPartitioner
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Settings, add_settings, markdown_table
from adacc_hf.eval.trials.compiled_graphs import GraphStep, graph_step
from adacc_hf.eval.trials.families import ATTENTIONS, FAMILIES, PRECISIONS, Size, in_precision
from adacc_hf.eval.trials.gradients import MAX_GRADIENT_ERROR, Gradients, relative_error
from adacc_hf.eval.zoo.configs import architectures

ARCHITECTURES = (
    "gpt_neox", "opt", "bloom", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "roberta", "electra", "vit", "bart",
)  # fmt: skip
"""Beside the four families, which are run with both attentions and in both precisions."""

SHARES = (0.75, 0.5, 0.3)
LOSSY_SHARE = 0.4
"""For the trial that may not recompute, so that it has to compress, as far as that goes."""
MIN_COMPRESS_BYTES = 64
"""The models are tiny."""
SIZE = Size(width=64, layers=2, tokens=32, batch=2)

Build = Callable[[Settings], tuple[nn.Module, dict[str, Tensor]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Check every model, print the table and save the record. Returns 1 if one is not as promised."""
    parser = argparse.ArgumentParser(prog="adacc eval partitions", description=__doc__.partition("\n")[0])
    names = list(cases())
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help="default: all")
    add_resume(parser)
    add_settings(parser, "partitions")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    run_info = {"models": arguments.models, "shares": SHARES, "lossy_share": LOSSY_SHARE}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name in tqdm(arguments.models, desc="partitions", unit="model"):
            ledger.measure(name, partial(_point, name, settings))
        ledger.finish()
        ledger.publish(report_text(ledger))
        return 0 if all(is_good(point) for point in ledger.points.values()) else 1


def cases() -> dict[str, tuple[Build, str]]:
    """What is built, and the precision it is run in, by the name of the point."""
    found: dict[str, tuple[Build, str]] = {}
    for family, attention, precision in product(FAMILIES, ATTENTIONS, PRECISIONS):
        found[f"{family}, {attention}, {precision}"] = (_family(family, attention), precision)
    return found | {f"{name}, sdpa, fp32": (_architecture(name), "fp32") for name in ARCHITECTURES}


def _family(family: str, attention: str) -> Build:
    def build(settings: Settings) -> tuple[nn.Module, dict[str, Tensor]]:
        model = FAMILIES[family].model(SIZE, attention, settings.device, settings.seed)
        return model, SIZE.batches(settings.device, settings.seed)

    return build


def _architecture(name: str) -> Build:
    def build(settings: Settings) -> tuple[nn.Module, dict[str, Tensor]]:
        architecture = architectures()[name]
        batch = architecture.make_batch(settings.seed)
        model = architecture.build(settings.seed)
        # The decorator around it in Transformers has no type that knows of self.
        model = model.to(settings.device)  # type: ignore[arg-type]
        return model, {key: tensor.to(settings.device) for key, tensor in batch.items()}

    return build


def _point(name: str, settings: Settings) -> dict[str, Any]:
    return check(*cases()[name], settings)


def check(build: Build, precision: str, settings: Settings) -> dict[str, Any]:
    """What was found for one model."""
    model, batch = build(settings)
    with in_precision(precision, settings.device):
        plain = graph_step(model, batch, min_cut_rematerialization_partition)
        lossless = [_trial(model, batch, plain, share, ("retain", "recompute")) for share in SHARES]
        lossy = _trial(model, batch, plain, LOSSY_SHARE, ("retain", "compress"))
    return {"lossless": lossless, "lossy": lossy}


def _trial(
    model: nn.Module, batch: dict[str, Tensor], plain: GraphStep, share: float, actions: tuple[str, ...]
) -> dict[str, Any]:
    partitioner = AdaccPartitioner(memory_budget=share, actions=actions, min_compress_bytes=MIN_COMPRESS_BYTES)
    step = graph_step(model, batch, partitioner)
    gradients = [Gradients(found.loss, found.gradients) for found in (plain, step)]
    policy = partitioner.policy
    return {
        "share": share,
        "regions": len(policy.regions),
        "plain_bytes": policy.plain_bytes,
        "predicted_bytes": policy.stored_bytes,
        "stored_bytes": step.stored_bytes,
        "overhead_ms": policy.overhead_ms,
        "same_bits": torch.equal(step.loss, plain.loss) and relative_error(*gradients) == 0.0,
        "gradient_error": relative_error(*gradients),
        "reasons": [plan.reason for plan in policy.regions if plan.reason],
    }


def is_good(point: dict[str, Any]) -> bool:
    """Whether all promises are kept: bits, bytes, and that less memory is never cheaper."""
    lossless, lossy = point["lossless"], point["lossy"]
    costs = [trial["overhead_ms"] for trial in lossless]
    return (
        all(trial["same_bits"] for trial in lossless)
        and all(trial["stored_bytes"] == trial["predicted_bytes"] for trial in [*lossless, lossy])
        and lossy["gradient_error"] <= MAX_GRADIENT_ERROR
        and costs == sorted(costs)
    )


def report_text(ledger: Ledger) -> str:
    """One line per model."""
    rows = [_row(name, point) for name, point in ledger.points.items()]
    num_good = sum(is_good(point) for point in ledger.points.values())
    return f"{markdown_table(rows)}\n\n{num_good} of {len(rows)} models keep every promise.\n"


def _row(name: str, point: dict[str, Any]) -> dict[str, str]:
    lossless, lossy = point["lossless"], point["lossy"]
    trials = [*lossless, lossy]
    return {
        "model": name,
        "regions": str(lossy["regions"]),
        "lossless": "same bits" if all(trial["same_bits"] for trial in lossless) else "differs",
        "stored bytes": "as predicted" if all(t["stored_bytes"] == t["predicted_bytes"] for t in trials) else "differ",
        "stored, of torch.compile's": " ".join(f"{t['stored_bytes'] / t['plain_bytes']:.2f}" for t in trials),
        "gradient error, compressed": f"{lossy['gradient_error']:.3f}",
    }


if __name__ == "__main__":
    sys.exit(main())
