"""What Adacc can win on a GPU that is not here, by the roofline of `adacc plan`.

    python -m adacc_hf.eval.roofline --device h100 --bandwidth 2.65 --tera-flops 600

For each model the step's time and peak plainly and under checkpointing, and Adacc's at half of plain's bytes and at
checkpointing's peak: its share of what can be won, (checkpointing - ours) / (checkpointing - plain), and its speed over
checkpointing's. The rates are the data sheet's unless they are given: programs reach less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from adacc_hf import AdaccConfig, Policy, solve_policy
from adacc_hf.artifacts.errors import InfeasibleBudgetError
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.devices import NAMES, TERA, Device, find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.model_presets import load_config
from adacc_hf.estimate.planning import Request, plain_ms, training_profile
from adacc_hf.eval.records.records import markdown_table, share_of_what_can_be_won
from adacc_hf.solve.baselines import simulate_checkpointed

CASES: Mapping[str, tuple[int, int]] = {"gpt2-345m": (16, 1024), "llama-1b": (4, 2048)}
"""Sequences and tokens of each, as the first minutes on a GPU measure them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m adacc_hf.eval.roofline", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=NAMES, default="h100")
    parser.add_argument("--bandwidth", type=float, help="TB/s between device and memory (default: the data sheet's)")
    parser.add_argument("--tera-flops", type=float, help="of products of 16-bit numbers (default: the data sheet's)")
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    arguments = parser.parse_args(argv)
    device = with_rates(find_device(arguments.device), arguments.bandwidth, arguments.tera_flops)
    rows = []
    for model in arguments.models:
        batch_size, seq_len = CASES[model]
        workload = Workload(config=load_config(model), device=device, precision=PRECISIONS["bf16-amp"])
        request = Request(model=model, workload=workload, batch_size=batch_size, seq_len=seq_len, find_largest=False)
        _, profile = training_profile(request)
        rows += [{"model": f"{model}, {batch_size} x {seq_len}"} | row for row in rows_of(profile)]
    print(markdown_table(rows))
    return 0


def with_rates(device: Device, bandwidth: float | None, tera_flops: float | None) -> Device:
    """Return the device with other rates. Fused attention keeps its own, which is a share of the data sheet's."""
    if bandwidth is not None:
        device = replace(device, bandwidth_bytes=bandwidth * TERA)
    if tera_flops is not None:
        given = dict.fromkeys(device.flops.keys() & {"bfloat16", "float16"}, tera_flops * TERA)
        share = device.attention_share * device.flops["bfloat16"] / (tera_flops * TERA)
        device = replace(device, flops=device.flops | given, attention_share=share)
    return device


def rows_of(profile: Profile) -> Iterator[dict[str, str]]:
    """The rows of one model."""
    plain, full = Policy.uniform(profile, "retain"), simulate_checkpointed(profile)
    base_ms = plain_ms(profile)
    full_ms = base_ms + full.overhead_ms

    def row(method: str, ms: float, peak_bytes: int, head: str) -> dict[str, str]:
        return {
            "method": method,
            "head": head,
            "ms": f"{ms:.1f}",
            "peak": format_bytes(peak_bytes),
            "over checkpointing": f"{full_ms / ms:.3f} x",
            "of what can be won": f"{share_of_what_can_be_won(full_ms, base_ms, ms):.1%}",
        }

    yield row("plain", base_ms, plain.predicted_peak_bytes, "plain")
    yield row("checkpointing", full_ms, full.peak_bytes, "plain")
    configs = {"Adacc": AdaccConfig(), "Adacc, lossless": AdaccConfig(actions=("retain", "recompute"))}
    for name, config in configs.items():
        for where, budget in (("at half of plain's bytes", 0.5), ("at checkpointing's peak", full.peak_bytes)):
            try:
                policy = solve_policy(profile, budget, config)
            except InfeasibleBudgetError:
                continue
            ms = base_ms + policy.predicted_overhead_ms
            yield row(f"{name} {where}", ms, policy.predicted_peak_bytes, policy.head)


if __name__ == "__main__":
    sys.exit(main())
