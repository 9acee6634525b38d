"""A plan as text and as a JSON record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from adacc_hf.ahead.planning import LENGTH_STEP, Planned
from adacc_hf.units import format_bytes

ASSUMPTIONS = (
    "Times are roofline times of one forward and backward on one device: max(operations / peak, bytes / bandwidth) + "
    "launch; communication, the optimizer's step and data loading are left out.",
    "Peaks are of live tensor bytes; operators' temporaries, the CUDA context and fragments of an allocator with "
    "expandable segments come on top, for which the margin is. Other segments' fragments take some 10 % more.",
    f"Sequences are looked for in steps of {LENGTH_STEP} tokens.",
    "Full recomputation keeps one input per block and runs the block's forward again; adacc is the solved policy.",
    "Replay is taken to be exact for torch's own operators that draw no random numbers.",
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
        "assumptions": list(ASSUMPTIONS),
    }


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
    rows = [("", "fits", "peak", "step ms", "of plain", "of full rec.", "largest batch", "longest sequence")]
    for name, forecast in planned.forecasts.items():
        ms = forecast.step_ms
        times = ("-", "-", "-") if ms is None else (f"{ms:.1f}", f"{ms / plain_ms:.3f}", f"{ms / full_ms:.3f}")
        longest = [_count(forecast.largest_batch), _count(forecast.longest_seq_len)]
        rows.append((name, "yes" if forecast.fits else "no", format_bytes(forecast.peak_bytes), *times, *longest))
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
    workload = planned.request.workload
    notes = [f"Rates: {workload.device.source}.", *ASSUMPTIONS]
    if any(
        option.codec == "outlier_int4" for kind in planned.profile.kinds for v in kind.values for option in v.codecs
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


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_cell(n, cell, widths[n]) for n, cell in enumerate(row)).rstrip() for row in rows]


def _cell(column: int, text: str, width: int) -> str:
    return f"{text:{width}}" if column == 0 else f"{text:>{width}}"
