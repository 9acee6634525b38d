"""Output of `adacc plan`: the predicted memory and time of a training run, as text and as a JSON record."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import fill
from typing import Any

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.images import image_size
from adacc_hf.estimate.planning import TrainingPlan, static_shortage
from adacc_hf.kernels.codecs import codec_type
from adacc_hf.price.codec_selection import OUTLIER_SHARE
from adacc_hf.reports.text_table import table_lines

WIDTH = 100
"""Width of the output of `adacc plan` in characters."""

MEASURED_SHARE = (0.87, 1.26)
"""Measured memory on the device, without the CUDA context, divided by the predicted peak.

The two numbers are the 10th and the 90th percentile over published measurements (first predictions,
eval/results/cpu/published.json). Measured memory includes fragments of the allocator and temporary tensors of kernels,
which the prediction leaves out."""
CONTEXT_BYTES = 1343 * 2**20
"""Bytes of the largest CUDA context that was published, with torch's kernels loaded (a V100, in Transformers' guide to
training on one GPU). Other published sizes are some hundred megabytes."""

ASSUMPTIONS = (
    "Times are roofline times of one forward and backward on one device: max(operations / peak, bytes / bandwidth) + "
    "launch. Communication, the optimizer's step and data loading are not included.",
    "Peaks count live tensor bytes.",
    "Full recomputation keeps one input per block and runs the block's forward again; adacc is the solved policy.",
    "Replay is assumed to be exact for torch's own operators, including dropout's masks.",
    "For 46 published memory measurements, 31 predictions were within 10 %, and the median error was 4.4 % "
    "(eval/results/cpu/published.md).",
)


def to_json(plan: TrainingPlan) -> dict[str, Any]:
    """Return the predictions of `adacc plan` as a dict that JSON can store."""
    request, device = plan.request, plan.request.workload.device
    return {
        "model": request.model,
        "device": device.name,
        "device_source": device.source,
        "traced_as": request.workload.trace,
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "attention": plan.attention,
        "optimizer": request.optimizer,
        "sharding": asdict(request.workload.sharding),
        "budget_bytes": request.budget,
        "host_memory_bytes": request.workload.adacc.host_memory,
        "host_bandwidth_bytes": device.host_bandwidth_bytes,
        "fits": plan.forecasts["adacc"].fits,
        "bound_bytes": plan.bound_bytes,
        "expected_bytes": expected_bytes(plan),
        "static": {**asdict(plan.static), "resting_bytes": plan.static.resting_bytes},
        "plain_stored_bytes": plan.profile.plain_stored_bytes,
        "phases": plan.phases,
        "methods": {name: asdict(forecast) for name, forecast in plan.forecasts.items()},
        "policy": None if plan.policy is None else plan.policy.to_json(),
        "assumptions": list(ASSUMPTIONS),
    }


def to_text(plan: TrainingPlan) -> str:
    """Return the predictions of `adacc plan` as text: title, verdict, tables of methods and of memory, and notes."""
    paragraphs = [fill(text, WIDTH) for text in (_plan_title(plan), _plan_verdict(plan), _expected_memory(plan))]
    notes = [fill(note, WIDTH) for note in _plan_notes(plan)]
    return "\n".join([*paragraphs, "", *_method_table(plan), "", *_memory_table(plan), "", *notes])


def _plan_title(plan: TrainingPlan) -> str:
    request, device = plan.request, plan.request.workload.device
    sharding = request.workload.sharding
    sharding_text = "" if sharding.method == "none" else f", {sharding.method} over {sharding.num_devices}"
    images_text = f" ({plan.image_tokens} of each sequence for images)" if plan.image_tokens else ""
    return (
        f"{request.model}: {len(plan.profile.blocks)} blocks, {request.batch_size} x {request.seq_len} tokens per "
        f"device{images_text}, {plan.attention} attention, {request.optimizer}{sharding_text}, on {device.title}"
    )


def _plan_verdict(plan: TrainingPlan) -> str:
    budget = format_bytes(plan.request.budget)
    adacc, plain = plan.forecasts["adacc"], plan.forecasts["plain"]
    if plain.fits:
        return f"fits the budget of {budget} without adacc: plain training peaks at {format_bytes(plain.peak_bytes)}"
    if plan.policy is not None:
        verdict = "fits" if _has_safe_budget(plan) else "may fit the device, and fits"
        return f"{verdict} the budget of {budget} with adacc: {plan.policy.summary()}"
    shortage = static_shortage(plan.request, plan.static)
    if shortage is not None:
        return f"does not fit: the budget of {shortage}"
    is_proven = plan.bound_bytes == adacc.peak_bytes
    bound = "" if is_proven else f" ({adacc.peak_bytes} bytes; no policy needs less than {plan.bound_bytes} bytes)"
    return (
        f"does not fit the budget of {budget}: the least possible peak is {format_bytes(adacc.peak_bytes)}{bound}. Use "
        f"{plan.request.cures('a smaller --batch-size or --seq-len')}"
    )


def _expected_memory(plan: TrainingPlan) -> str:
    shape = "All batches have the planned shape: longer or larger ones need more."
    expected = expected_bytes(plan)
    if expected is None:
        return f"The peak counts live tensors: Python, its libraries and the allocator's caches come on top. {shape}"
    low, high = expected
    text = (
        f"Expected on the device, {_best_method(plan)}: {format_bytes(low)} to {format_bytes(high)}. The peak counts "
        f"live tensors. 80 % of the published measurements were {MEASURED_SHARE[0]} to {MEASURED_SHARE[1]} times the "
        f"prediction (fragments of the allocator, temporary tensors of kernels), and the CUDA context takes up to "
        f"{format_bytes(CONTEXT_BYTES)}. {shape}"
    )
    memory_bytes = plan.request.workload.device.memory_bytes
    if _has_safe_budget(plan) or not plan.forecasts[_best_method(plan)].fits:
        return text
    safe_bytes = (memory_bytes - CONTEXT_BYTES) / MEASURED_SHARE[1]
    return (
        f"{text} The upper end is above the device's {format_bytes(memory_bytes)}: to be safe, pass --budget "
        f"{safe_bytes / 2**30:.1f}GiB."
    )


def _has_safe_budget(plan: TrainingPlan) -> bool:
    """Return True if the device has all the memory that training is expected to take."""
    expected = expected_bytes(plan)
    return expected is None or expected[1] <= plan.request.workload.device.memory_bytes


def expected_bytes(plan: TrainingPlan) -> tuple[int, int] | None:
    """Return a (low, high) estimate of the GPU memory in use, or None for a CPU.

    Only `high` includes the CUDA context.
    """
    if plan.request.workload.device.trace == "cpu":
        return None
    peak_bytes = plan.forecasts[_best_method(plan)].peak_bytes
    low, high = (round(share * peak_bytes) for share in MEASURED_SHARE)
    return low, high + CONTEXT_BYTES


def _best_method(plan: TrainingPlan) -> str:
    """Return the training method that the estimate of memory in use on the device is for: "plain" if plain training
    fits, else "adacc"."""
    return "plain" if plan.forecasts["plain"].fits else "adacc"


def _method_table(plan: TrainingPlan) -> list[str]:
    plain_ms = plan.forecasts["plain"].step_ms
    full_ms = plan.forecasts["full recomputation"].step_ms
    forecasts = plan.forecasts.values()
    rows: list[tuple[str, ...]] = [
        ("", *plan.forecasts),
        ("fits", *("yes" if forecast.fits else "no" for forecast in forecasts)),
        ("peak", *(format_bytes(forecast.peak_bytes) for forecast in forecasts)),
        ("step", *(_plan_ratio(forecast.step_ms, 1, "{:.1f} ms") for forecast in forecasts)),
        ("of plain's time", *(_plan_ratio(forecast.step_ms, plain_ms) for forecast in forecasts)),
        ("of recomputation's", *(_plan_ratio(forecast.step_ms, full_ms) for forecast in forecasts)),
    ]
    return table_lines(rows, right=range(1, len(rows[0])))


def _memory_table(plan: TrainingPlan) -> list[str]:
    static = plan.static
    bytes_by_part = {
        "parameters": static.parameters_bytes,
        "optimizer state": static.optimizer_bytes,
        "buffers": static.buffers_bytes,
        "unsharded layers in use": static.unsharded_bytes,
        "buckets of gradients": static.buckets_bytes + static.backward_buckets_bytes,
        "gradients at the end of backward": static.gradients_bytes,
        "activations of plain training": plan.profile.plain_stored_bytes,
    }
    if plan.policy is not None:
        bytes_by_part["activations under the policy"] = plan.policy.predicted_stored_bytes
        bytes_by_part["in host memory under the policy"] = plan.policy.predicted_host_bytes
    method = "the policy" if plan.policy is not None else "full recomputation"
    peaks = {f"peak: {phase}": nbytes for phase, nbytes in plan.phases.items()}
    rows = [("memory per device", "")] + [(name, format_bytes(n)) for name, n in bytes_by_part.items() if n]
    rows += [(f"step under {method}", "")] + [(name, format_bytes(n)) for name, n in peaks.items()]
    return table_lines(rows, right=(1,))


def _plan_notes(plan: TrainingPlan) -> list[str]:
    workload = plan.request.workload
    notes = [f"Rates: {workload.device.source}.", *ASSUMPTIONS]
    if any(
        codec_type(option.codec).keeps_outliers
        for kind in plan.profile.kinds
        for v in kind.values
        for option in v.codecs
    ):
        notes.append(f"{100 * OUTLIER_SHARE:g} % of the channels are assumed to be outliers.")
    if workload.images:
        _, height, width = image_size(workload.config)
        notes.append(
            f"Images have {height} x {width} pixels. The vision tower is trained like the language model, and its "
            f"activations are included."
        )
    if workload.adacc.host_memory is not None:
        notes.append(_host_note(plan))
    if workload.trace != workload.device.trace:
        notes.append(
            "Traced with the CPU's operators: autocast leaves pow and norms in 16 bits, dropout keeps float masks and "
            "attention with dropout or a bias is not fused, so activations differ from a GPU's."
        )
    return notes


def _host_note(plan: TrainingPlan) -> str:
    workload = plan.request.workload
    limit = workload.adacc.host_limit(plan.profile.host_free_bytes)
    text = f"Up to {format_bytes(limit)} of host memory per device (--host-memory) may hold activations."
    bandwidth = workload.device.host_bandwidth_bytes
    if bandwidth is None:
        return text
    host_bytes = 0 if plan.policy is None else plan.policy.predicted_host_bytes
    return (
        f"{text} Copies are assumed to run at {bandwidth / 1e9:g} GB/s in each direction (--host-bandwidth; default: "
        f"80 % of 16 lanes of the device's PCIe generation) and not to overlap with kernels: "
        f"{2e3 * host_bytes / bandwidth:.1f} ms per step here."
    )


def _plan_ratio(ms: float | None, reference_ms: float | None, form: str = "{:.3f}") -> str:
    return "-" if ms is None or reference_ms is None else form.format(ms / reference_ms)
