"""`adacc plan`: predict memory and time of a training run, on a device that need not be present, as text or JSON."""

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
    from adacc_hf.estimate.planning import Request, TrainingPlan

_PRECISIONS = ("fp32", "bf16", "bf16-amp", "fp16-amp")


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of `adacc`."""
    parser = commands.add_parser(
        "plan", help="predict, without a GPU and without weights, if training fits a device, and its memory and time"
    )
    parser.add_argument("--model", required=True, help="preset, hub id or folder of a language model's config")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per device and step (default 8)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the model's context length)")
    parser.add_argument(
        "--dtype",
        choices=_PRECISIONS,
        default="bf16-amp",
        help="fp32 and bf16 use that dtype for all tensors; -amp is float32 with autocast (default bf16-amp)",
    )
    parser.add_argument("--attn", choices=("sdpa", "eager"), default="sdpa", help="attention (default sdpa)")
    parser.add_argument(
        "--optimizer", default="adamw", help="adamw (fused), adamw_foreach, adamw_8bit, lion, ... (default adamw)"
    )
    parser.add_argument(
        "--rank",
        help="rank for --optimizer compact: a fraction of a layer's inputs, or a number of them (default 0.25)",
    )
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(NAMES)} (default h100)")
    parser.add_argument(
        "--budget", help="memory per device, such as 20GiB (default: the device's memory minus 5 percent)"
    )
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument("--ddp", type=int, metavar="N", help="data parallel on N devices")
    shared.add_argument("--fsdp", type=int, metavar="N", help="fully sharded on N devices")
    shared.add_argument("--zero", type=int, nargs=2, metavar=("STAGE", "N"), help="DeepSpeed ZeRO 1, 2 or 3 on N")
    parser.add_argument("--peft", choices=("lora",), help="train adapters only")
    parser.add_argument("--lora-rank", type=int, help="rank for --peft lora (default: PEFT's, 8)")
    parser.add_argument(
        "--lora-targets", nargs="+", metavar="NAME", help="layers with adapters (default: PEFT's for the architecture)"
    )
    parser.add_argument(
        "--accumulate",
        action="store_true",
        help="plan for several micro-batches per step (gradient_accumulation_steps > 1)",
    )
    parser.add_argument("--profile", type=Path, help="use this saved profile instead of a trace and a roofline")
    parser.add_argument(
        "--trace", choices=("cuda", "cpu"), help="trace the operators of this device type (default: the device's)"
    )
    parser.add_argument(
        "--outlier-share",
        type=float,
        default=0.01,
        help="share of the channels assumed to be outliers, 0 to 1 (default 0.01)",
    )
    parser.add_argument(
        "--no-largest", action="store_true", help="do not search for the largest batch and the longest sequence"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    parser.add_argument("--html", type=Path, metavar="DIR", help="also write the report into this folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """Compute the plan that `arguments` describe, and return it as text or JSON."""
    from adacc_hf.estimate.planning import plan

    training_plan = plan(_request(arguments))
    if arguments.html is not None:
        _write_report(arguments.html, training_plan)
    return json.dumps(to_json(training_plan), indent=1) if arguments.json else to_text(training_plan)


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
        raise ValueError(f"--rank={arguments.rank} needs --optimizer {COMPACT}: pass both options, or neither")
    sharding = _sharding(arguments)
    if not 0 <= arguments.outlier_share <= 1:
        raise ValueError(
            f"--outlier-share={arguments.outlier_share} is outside 0 to 1: the value is a share of the channels"
        )
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
                raise ValueError(f"--lora-{option} needs --peft lora: pass both options, or neither")
        return None
    if rank is not None and rank < 1:
        raise ValueError(f"--lora-rank={rank} must be at least 1")
    return Adapters(rank=rank, targets=None if targets is None else tuple(targets))


def _rank(text: str | None) -> float | int:
    from adacc_hf.compact import parse_rank

    try:
        return parse_rank(text or "0.25")
    except ValueError:
        raise ValueError(
            f"--rank={text} must be a fraction of a layer's inputs, such as 0.25, or a number of them"
        ) from None


def _sharding(arguments: argparse.Namespace) -> Any:
    from adacc_hf.estimate.static_memory import Sharding

    if arguments.ddp is not None:
        return Sharding(method="ddp", num_devices=arguments.ddp)
    if arguments.fsdp is not None:
        return Sharding(method="fsdp", num_devices=arguments.fsdp)
    if arguments.zero is not None:
        stage, num_devices = arguments.zero
        if stage not in (1, 2, 3):
            raise ValueError(f"--zero {stage} {num_devices}: ZeRO has no stage {stage}, choose 1, 2 or 3")
        return Sharding(method=f"zero{stage}", num_devices=num_devices)
    return Sharding()


def _write_report(folder: Path, plan: TrainingPlan) -> None:
    from adacc_hf.reports.report import write_report

    policy = plan.policy or uniform_policy(plan.profile, "recompute")
    comparison = [
        {
            "method": name,
            "fits": "yes" if forecast.fits else "no",
            "peak_bytes": forecast.peak_bytes,
            "step_ms": forecast.step_ms,
            "largest_batch": forecast.largest_batch,
            "longest_seq_len": forecast.longest_seq_len,
        }
        for name, forecast in plan.forecasts.items()
    ]
    write_report(folder, profile=plan.profile, policy=policy, comparison=comparison, remarks=remarks(plan))


# Formatting of a plan as text and as a JSON record.

ASSUMPTIONS = (
    "Times are roofline times of one forward and backward on one device: max(operations / peak, bytes / bandwidth) + "
    "launch. Communication, the optimizer's step and data loading are not included.",
    "Peaks count live tensor bytes. The margin must cover operators' temporaries, the CUDA context and the fragments "
    'of an allocator with expandable segments. "reserved" is the memory that an allocator without expandable segments '
    "holds after two steps.",
    "The longest sequence is searched in steps of {length_step} tokens.",
    "Full recomputation keeps one input per block and runs the block's forward again; adacc is the solved policy.",
    "Replay is assumed to be exact for torch's own operators, including dropout's masks.",
    "For 46 published memory measurements, 31 predictions were within 10 %, and the median error was 4.5 % "
    "(eval/results/cpu/published.md).",
)


def to_json(plan: TrainingPlan) -> dict[str, Any]:
    """Return the plan as a record of JSON values."""
    request, device = plan.request, plan.request.workload.device
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
        "fits": plan.forecasts["adacc"].fits,
        "bound_bytes": plan.bound_bytes,
        "static": {**asdict(plan.static), "resting_bytes": plan.static.resting_bytes},
        "plain_stored_bytes": plan.profile.plain_stored_bytes,
        "phases": plan.phases,
        "methods": {name: asdict(forecast) for name, forecast in plan.forecasts.items()},
        "policy": None if plan.policy is None else plan.policy.to_json(),
        "assumptions": _assumptions(),
    }


def _assumptions() -> list[str]:
    from adacc_hf.estimate.planning import LENGTH_STEP

    return [text.replace("{length_step}", str(LENGTH_STEP)) for text in ASSUMPTIONS]


def to_text(plan: TrainingPlan) -> str:
    """Return the plan as text: title, verdict, tables of methods and of memory, and notes."""
    tables = [*_method_table(plan), "", *_memory_table(plan)]
    return "\n".join([_title(plan), _verdict(plan), "", *tables, "", *_notes(plan)])


def remarks(plan: TrainingPlan) -> list[str]:
    """Return the introduction of the plan's report: the settings, the verdict and the assumptions."""
    fallback = "The policy shown is full recomputation, because no policy fits the budget."
    return [
        f"{_title(plan)}.",
        f"{_verdict(plan)}.",
        *([] if plan.policy is not None else [fallback]),
        " ".join(_notes(plan)),
    ]


def _title(plan: TrainingPlan) -> str:
    request, device = plan.request, plan.request.workload.device
    sharding = request.workload.sharding
    sharding_text = "" if sharding.method == "none" else f", {sharding.method} over {sharding.num_devices}"
    return (
        f"{request.model}: {len(plan.profile.blocks)} blocks, {request.batch_size} x {request.seq_len} tokens per "
        f"device, {request.workload.attention} attention, {request.optimizer}{sharding_text}, on {device.title}"
    )


def _verdict(plan: TrainingPlan) -> str:
    budget = format_bytes(plan.request.budget)
    adacc, plain = plan.forecasts["adacc"], plan.forecasts["plain"]
    if plain.fits:
        return f"fits {budget} without adacc: plain training peaks at {format_bytes(plain.peak_bytes)}"
    if plan.policy is not None:
        return f"fits {budget} with adacc: {plan.policy.summary()}"
    is_proven = plan.bound_bytes == adacc.peak_bytes
    bound = "" if is_proven else f" ({adacc.peak_bytes} bytes; no policy needs less than {plan.bound_bytes} bytes)"
    return (
        f"does not fit {budget}: the least possible peak is {format_bytes(adacc.peak_bytes)}{bound}. Use a smaller "
        f"--batch-size or --seq-len, --fsdp N or --zero 3 N, a smaller --optimizer, or --peft lora"
    )


def _method_table(plan: TrainingPlan) -> list[str]:
    plain_ms = plan.forecasts["plain"].step_ms
    full_ms = plan.forecasts["full recomputation"].step_ms
    rows: list[tuple[str, ...]] = [
        ("", "fits", "peak", "reserved", "step ms", "of plain", "of full rec.", "largest batch", "longest sequence")
    ]
    for name, forecast in plan.forecasts.items():
        ms = forecast.step_ms
        times = ("-", "-", "-")
        if ms is not None and plain_ms is not None and full_ms is not None:
            times = f"{ms:.1f}", f"{ms / plain_ms:.3f}", f"{ms / full_ms:.3f}"
        longest = [_count(forecast.largest_batch), _count(forecast.longest_seq_len)]
        reserved = "-" if forecast.reserved_bytes is None else format_bytes(forecast.reserved_bytes)
        fits = "yes" if forecast.fits else "no"
        rows.append((name, fits, format_bytes(forecast.peak_bytes), reserved, *times, *longest))
    return _table(rows)


def _memory_table(plan: TrainingPlan) -> list[str]:
    static = plan.static
    bytes_by_part = {
        "parameters": static.parameters_bytes,
        "optimizer state": static.optimizer_bytes,
        "buffers": static.buffers_bytes,
        "unsharded layers in use": static.unsharded_bytes,
        "DDP's buckets": static.buckets_bytes,
        "gradients at the end of backward": static.gradients_bytes,
        "activations of plain training": plan.profile.plain_stored_bytes,
    }
    if plan.policy is not None:
        bytes_by_part["activations under the policy"] = plan.policy.predicted_stored_bytes
    method = "the policy" if plan.policy is not None else "full recomputation"
    peaks = {f"peak: {phase}": nbytes for phase, nbytes in plan.phases.items()}
    rows = [("memory per device", "")] + [(name, format_bytes(n)) for name, n in bytes_by_part.items() if n]
    rows += [(f"step under {method}", "")] + [(name, format_bytes(n)) for name, n in peaks.items()]
    return _table(rows)


def _notes(plan: TrainingPlan) -> list[str]:
    from adacc_hf.kernels.codecs import codec_type

    workload = plan.request.workload
    notes = [f"Rates: {workload.device.source}.", *_assumptions()]
    if any(
        codec_type(option.codec).keeps_outliers
        for kind in plan.profile.kinds
        for v in kind.values
        for option in v.codecs
    ):
        notes.append(
            f"{100 * workload.outlier_share:g} % of the channels are assumed to be outliers (--outlier-share)."
        )
    if plan.request.profile is not None:
        notes = [
            f"Operator times, activations and peaks come from the saved profile, measured on {plan.profile.device}."
        ]
    elif workload.trace != workload.device.trace:
        notes.append(
            "Traced with the CPU's operators: autocast leaves pow and norms in 16 bits, dropout keeps float masks and "
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
