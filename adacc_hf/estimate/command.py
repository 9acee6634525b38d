"""`adacc plan`: what a training run would take on a device that need not be here, as text and as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.units import format_bytes, parse_bytes
from adacc_hf.estimate.devices import NAMES
from adacc_hf.solve.simple_policies import uniform_policy

if TYPE_CHECKING:
    from adacc_hf.estimate.planning import Planned, Request

_PRECISIONS = ("fp32", "bf16", "bf16-amp", "fp16-amp")


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of `adacc`."""
    parser = commands.add_parser(
        "plan", help="tell, without a GPU and without weights, whether training fits a device and what it costs"
    )
    parser.add_argument("--model", required=True, help="preset, hub id or folder of a language model's config")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per device and step (default 8)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence; left out, the longest the model can take")
    parser.add_argument(
        "--dtype",
        choices=_PRECISIONS,
        default="bf16-amp",
        help="fp32 and bf16 hold everything in that dtype; -amp is float32 with autocast (default bf16-amp)",
    )
    parser.add_argument("--attn", choices=("sdpa", "eager"), default="sdpa", help="attention (default sdpa)")
    parser.add_argument(
        "--optimizer", default="adamw", help="adamw (fused), adamw_foreach, adamw_8bit, lion, ... (default adamw)"
    )
    parser.add_argument(
        "--rank", help="of --optimizer compact: part of a layer's inputs, or their number (default 0.25)"
    )
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(NAMES)} (default h100)")
    parser.add_argument("--budget", help="memory per device, such as 20GiB (default: the device's less 5 percent)")
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument("--ddp", type=int, metavar="N", help="data parallel on N devices")
    shared.add_argument("--fsdp", type=int, metavar="N", help="fully sharded on N devices")
    shared.add_argument("--zero", type=int, nargs=2, metavar=("STAGE", "N"), help="DeepSpeed ZeRO 1, 2 or 3 on N")
    parser.add_argument("--peft", choices=("lora",), help="train adapters only")
    parser.add_argument("--lora-rank", type=int, help="of --peft lora (default: PEFT's, 8)")
    parser.add_argument(
        "--lora-targets", nargs="+", metavar="NAME", help="layers with adapters (default: PEFT's for the architecture)"
    )
    parser.add_argument(
        "--accumulate", action="store_true", help="a step has several micro-batches (gradient_accumulation_steps > 1)"
    )
    parser.add_argument("--profile", type=Path, help="price with this saved profile instead of a trace and a roofline")
    parser.add_argument("--trace", choices=("cuda", "cpu"), help="whose operators to trace (default: the device's)")
    parser.add_argument(
        "--outlier-share",
        type=float,
        default=0.01,
        help="share of the channels taken as outliers, 0 to 1 (default 0.01)",
    )
    parser.add_argument("--no-largest", action="store_true", help="do not look for the largest batch and sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    parser.add_argument("--html", type=Path, metavar="DIR", help="also write the report into this folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The plan that `arguments` ask for, as text or JSON."""
    from adacc_hf.estimate.planning import plan

    planned = plan(_request(arguments))
    if arguments.html is not None:
        _write_report(arguments.html, planned)
    return json.dumps(to_json(planned), indent=1) if arguments.json else to_text(planned)


def _request(arguments: argparse.Namespace) -> Request:
    from adacc_hf.artifacts.profile import Profile
    from adacc_hf.estimate.devices import find_device
    from adacc_hf.estimate.fake_model import PRECISIONS, Workload
    from adacc_hf.estimate.model_presets import checked_seq_len, context_length, load_config
    from adacc_hf.estimate.planning import Request
    from adacc_hf.estimate.static_memory import COMPACT, check_optimizer

    device = find_device(arguments.device)
    check_optimizer(arguments.optimizer)
    if arguments.rank is not None and arguments.optimizer != COMPACT:
        raise ValueError(f"--rank={arguments.rank} is of --optimizer {COMPACT} alone: give both, or neither")
    sharding = _sharding(arguments)
    if not 0 <= arguments.outlier_share <= 1:
        raise ValueError(f"--outlier-share={arguments.outlier_share} is outside 0 to 1: it is a share of the channels")
    config = load_config(arguments.model)
    workload = Workload(
        config=config,
        device=device,
        precision=PRECISIONS[arguments.dtype],
        attention=arguments.attn,
        adapters=_adapters(arguments),
        compact_rank=_rank(arguments.rank) if arguments.optimizer == COMPACT else None,
        trace=arguments.trace or device.trace,
        sharding=sharding,
        outlier_share=arguments.outlier_share,
    )
    return Request(
        model=arguments.model,
        workload=workload,
        batch_size=arguments.batch_size,
        seq_len=checked_seq_len(arguments.seq_len, config, option="--seq-len"),
        optimizer=arguments.optimizer,
        accumulates=arguments.accumulate,
        budget_bytes=None if arguments.budget is None else parse_bytes(arguments.budget, "--budget"),
        longest_seq_len=context_length(config),
        find_largest=not arguments.no_largest,
        profile=None if arguments.profile is None else Profile.load(arguments.profile),
    )


def _adapters(arguments: argparse.Namespace) -> Any:
    from adacc_hf.estimate.fake_model import Adapters

    rank, targets = arguments.lora_rank, arguments.lora_targets
    if arguments.peft is None:
        for option, value in (("rank", rank), ("targets", targets)):
            if value is not None:
                raise ValueError(f"--lora-{option} is of --peft lora alone: give both, or neither")
        return None
    if rank is not None and rank < 1:
        raise ValueError(f"--lora-rank={rank} must be at least 1")
    return Adapters(rank=rank, targets=None if targets is None else tuple(targets))


def _rank(text: str | None) -> float | int:
    from adacc_hf.compact import parse_rank

    try:
        return parse_rank(text or "0.25")
    except ValueError:
        raise ValueError(f"--rank={text} must be a part of a layer's inputs, such as 0.25, or their number") from None


def _sharding(arguments: argparse.Namespace) -> Any:
    from adacc_hf.estimate.static_memory import Sharding

    if arguments.ddp is not None:
        return Sharding(method="ddp", num_devices=arguments.ddp)
    if arguments.fsdp is not None:
        return Sharding(method="fsdp", num_devices=arguments.fsdp)
    if arguments.zero is not None:
        stage, num_devices = arguments.zero
        if stage not in (1, 2, 3):
            raise ValueError(f"--zero {stage} {num_devices} has no such stage: choose 1, 2 or 3")
        return Sharding(method=f"zero{stage}", num_devices=num_devices)
    return Sharding()


def _write_report(folder: Path, planned: Planned) -> None:
    from adacc_hf.reports.report import write_report

    policy = planned.policy or uniform_policy(planned.profile, "recompute")
    comparison = [
        {
            "method": name,
            "fits": "yes" if forecast.fits else "no",
            "peak_bytes": forecast.peak_bytes,
            "step_ms": forecast.step_ms,
            "largest_batch": forecast.largest_batch,
            "longest_seq_len": forecast.longest_seq_len,
        }
        for name, forecast in planned.forecasts.items()
    ]
    write_report(folder, profile=planned.profile, policy=policy, comparison=comparison, remarks=remarks(planned))


# A plan as text and as a JSON record.

ASSUMPTIONS = (
    "Times are roofline times of one forward and backward on one device: max(operations / peak, bytes / bandwidth) + "
    "launch; communication, the optimizer's step and data loading are left out.",
    "Peaks are of live tensor bytes; operators' temporaries, the CUDA context and fragments of an allocator with "
    "expandable segments come on top, for which the margin is. Reserved is what an allocator without those keeps "
    "after two steps.",
    "Sequences are looked for in steps of {length_step} tokens.",
    "Full recomputation keeps one input per block and runs the block's forward again; adacc is the solved policy.",
    "Replay is taken to be exact for torch's own operators, dropout's masks included.",
    "Of 46 published measurements of memory such plans told 31 within 10 %, and half within 4.5 % "
    "(eval/results/cpu/published.md).",
)


def to_json(planned: Planned) -> dict[str, Any]:
    """The plan as a record of JSON values."""
    request, device = planned.request, planned.request.workload.device
    return {
        "model": request.model,
        "device": device.name,
        "device_source": device.source,
        "traced_as": request.workload.trace,
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "attention": request.workload.attention,
        "optimizer": request.optimizer,
        "sharding": asdict(request.workload.sharding),
        "budget_bytes": request.budget,
        "outlier_share": request.workload.outlier_share,
        "fits": planned.forecasts["adacc"].fits,
        "bound_bytes": planned.bound_bytes,
        "static": {**asdict(planned.static), "resting_bytes": planned.static.resting_bytes},
        "plain_stored_bytes": planned.profile.plain_stored_bytes,
        "phases": planned.phases,
        "methods": {name: asdict(forecast) for name, forecast in planned.forecasts.items()},
        "policy": None if planned.policy is None else planned.policy.to_json(),
        "assumptions": _assumptions(),
    }


def _assumptions() -> list[str]:
    from adacc_hf.estimate.planning import LENGTH_STEP

    return [text.replace("{length_step}", str(LENGTH_STEP)) for text in ASSUMPTIONS]


def to_text(planned: Planned) -> str:
    """The plan for people."""
    parts = [_title(planned), _verdict(planned), "", *_methods(planned), "", *_memory(planned), "", *_notes(planned)]
    return "\n".join(parts)


def remarks(planned: Planned) -> list[str]:
    """What a report of the plan begins with: what was asked for, whether it fits, what was assumed."""
    shown = [] if planned.policy is not None else ["The policy shown is full recomputation, since none fits."]
    return [f"{_title(planned)}.", f"{_verdict(planned)}.", *shown, " ".join(_notes(planned))]


def _title(planned: Planned) -> str:
    request, device = planned.request, planned.request.workload.device
    sharding = request.workload.sharding
    shared = "" if sharding.method == "none" else f", {sharding.method} over {sharding.num_devices}"
    return (
        f"{request.model}: {len(planned.profile.blocks)} blocks, {request.batch_size} x {request.seq_len} tokens per "
        f"device, {request.workload.attention} attention, {request.optimizer}{shared}, on {device.title}"
    )


def _verdict(planned: Planned) -> str:
    budget = format_bytes(planned.request.budget)
    adacc, plain = planned.forecasts["adacc"], planned.forecasts["plain"]
    if plain.fits:
        return f"fits {budget} as it is: plain training peaks at {format_bytes(plain.peak_bytes)}"
    if planned.policy is not None:
        return f"fits {budget} with adacc: {planned.policy.summary()}"
    is_proven = planned.bound_bytes == adacc.peak_bytes
    bound = "" if is_proven else f" ({adacc.peak_bytes} bytes; no policy needs less than {planned.bound_bytes} bytes)"
    return (
        f"does not fit {budget}: the least possible peak is {format_bytes(adacc.peak_bytes)}{bound}. Use a smaller "
        f"--batch-size or --seq-len, --fsdp N or --zero 3 N, a smaller --optimizer, or --peft lora"
    )


def _methods(planned: Planned) -> list[str]:
    plain_ms = planned.forecasts["plain"].step_ms
    full_ms = planned.forecasts["full recomputation"].step_ms
    rows: list[tuple[str, ...]] = [
        ("", "fits", "peak", "reserved", "step ms", "of plain", "of full rec.", "largest batch", "longest sequence")
    ]
    for name, forecast in planned.forecasts.items():
        ms = forecast.step_ms
        times = ("-", "-", "-")
        if ms is not None and plain_ms is not None and full_ms is not None:
            times = f"{ms:.1f}", f"{ms / plain_ms:.3f}", f"{ms / full_ms:.3f}"
        longest = [_count(forecast.largest_batch), _count(forecast.longest_seq_len)]
        reserved = "-" if forecast.reserved_bytes is None else format_bytes(forecast.reserved_bytes)
        fits = "yes" if forecast.fits else "no"
        rows.append((name, fits, format_bytes(forecast.peak_bytes), reserved, *times, *longest))
    return _table(rows)


def _memory(planned: Planned) -> list[str]:
    static = planned.static
    named = {
        "parameters": static.parameters_bytes,
        "optimizer state": static.optimizer_bytes,
        "buffers": static.buffers_bytes,
        "whole layers in flight": static.unsharded_bytes,
        "DDP's buckets": static.buckets_bytes,
        "gradients, when backward ends": static.gradients_bytes,
        "activations of plain training": planned.profile.plain_stored_bytes,
    }
    if planned.policy is not None:
        named["activations under the policy"] = planned.policy.predicted_stored_bytes
    under = "the policy" if planned.policy is not None else "full recomputation"
    peaks = {f"peak: {phase}": nbytes for phase, nbytes in planned.phases.items()}
    rows = [("memory per device", "")] + [(name, format_bytes(n)) for name, n in named.items() if n]
    rows += [(f"step under {under}", "")] + [(name, format_bytes(n)) for name, n in peaks.items()]
    return _table(rows)


def _notes(planned: Planned) -> list[str]:
    from adacc_hf.kernels.codecs import codec_type

    workload = planned.request.workload
    notes = [f"Rates: {workload.device.source}.", *_assumptions()]
    if any(
        codec_type(option.codec).keeps_outliers
        for kind in planned.profile.kinds
        for v in kind.values
        for option in v.codecs
    ):
        notes.append(f"{100 * workload.outlier_share:g} % of the channels are taken to be outliers (--outlier-share).")
    if planned.request.profile is not None:
        notes = [f"Prices, activations and peaks are those of the saved profile, taken on {planned.profile.device}."]
    elif workload.trace != workload.device.trace:
        notes.append(
            "Traced as the CPU runs it: autocast leaves pow and norms in 16 bits, dropout keeps float masks and "
            "attention with dropout or a bias is not fused, so activations differ from a GPU's."
        )
    return notes


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_cell(n, cell, widths[n]) for n, cell in enumerate(row)).rstrip() for row in rows]


def _cell(column: int, text: str, width: int) -> str:
    return f"{text:{width}}" if column == 0 else f"{text:>{width}}"
