"""Costs of torch.compile with Adacc's partitioner: stored bytes and peaks over budgets, step times, compile times.

    adacc eval compiled

Small models compile through Inductor, each measurement in its own process. Each budget bounds the peak of what a region
stores. The bytes that forward stores for backward must equal the prediction, to the byte (on a GPU up to the
allocator's rounding), or the run fails. Each compilation runs with an empty cache, and again with the filled cache.

Three more figures are reported:
- the budgets whose peak is above the peak of a larger budget;
- the difference of measured peaks from the live bytes of the compiled code, and from those of the backward graphs;
- step times divided by the predicted times, which are plain torch.compile's times plus the plans' overhead.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Choice
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.compiler import AdaccPartitioner, CompiledPolicy
from adacc_hf.compiler.backend import InstalledPartitioner
from adacc_hf.compiler.compiled_policy import PlanStore
from adacc_hf.eval.records.command_line import CLOCKS, cpu_seconds, parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, Status
from adacc_hf.eval.throughput import Run
from adacc_hf.eval.trials.isolation import run_isolated
from adacc_hf.eval.trials.limits import fits_budget
from adacc_hf.eval.trials.workload import Batch, Workload
from adacc_hf.price.timing import seconds_of
from adacc_hf.reports.run_record import markdown_table
from adacc_hf.torch_glue.memory import backward, forward_loss, measure_step

WORKLOADS = {
    family: Workload(width=128, layers=2, batch=4, tokens=128, family=family) for family in ("gpt2", "llama", "t5")
}
LOSSLESS, ALL = ("retain", "recompute"), ("retain", "compress", "recompute")
COMPILED = {
    "torch.compile": None,
    "Adacc at 70 %, lossless": (0.7, LOSSLESS),
    "Adacc at 40 %, lossless": (0.4, LOSSLESS),
    "Adacc at 40 %": (0.4, ALL),
}
"""Compilations that are timed: a share and actions, or None for plain torch.compile."""
MOST, LEAST = 0.95, 0.2
"""Largest and smallest budget, as a share of the bytes that plain torch.compile stores."""
ROUNDS = 7
"""Timed steps of each graph."""


def main(argv: Sequence[str] | None = None, run: Run = run_isolated) -> int:
    """Measure, print the tables, save record and plot. Return 1 if stored bytes differ from the prediction."""
    parser = runner_parser("compiled", __doc__)
    parser.add_argument("--families", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--budgets", type=positive_int, default=4, help="number of budgets for each family")
    parser.add_argument("--timeout", type=positive_int, default=3600, help="time limit of one measurement in seconds")
    arguments, settings = parse(parser, argv, clock=True)
    info = {
        "workloads": {family: asdict(WORKLOADS[family]) for family in arguments.families},
        "budgets": arguments.budgets,
        "clock": arguments.clock,
        "rounds": ROUNDS,
    }
    shared = {"device": settings.device, "seed": settings.seed, "threads": settings.threads}
    points: dict[str, Callable[[], Figures]] = {}
    for family in arguments.families:
        order = {"family": family, "shares": shares(arguments.budgets), "clock": arguments.clock, **shared}
        points[f"{family}, budgets"] = partial(run, measure_budgets, order, arguments.timeout)
    first = arguments.families[0]
    for name in COMPILED:
        order = {"family": first, "name": name, **shared}
        points[f"{first}, compilation, {name}"] = partial(compile_twice, order, arguments.timeout, run)
    ledger = run_points(settings, info, arguments.resume, lambda _: points, report_text, save_plot)
    return 0 if all(is_good(point, settings.device) for point in ledger.points.values()) else 1


def shares(count: int) -> list[float]:
    """Return `count` evenly spaced shares in falling order."""
    step = (MOST - LEAST) / max(1, count - 1)
    return [round(MOST - step * number, 4) for number in range(count)]


def compile_twice(order: Figures, timeout_s: float, run: Run) -> Figures:
    """Compile with an empty cache, and again in another process with the cache that the first one filled."""
    with tempfile.TemporaryDirectory(prefix="adacc-compiled-") as cache:
        first = run(measure_compilation, {**order, "cache": cache}, timeout_s)
        if first["status"] != Status.MEASURED.value:
            return first
        return {**first, "again": run(measure_compilation, {**order, "cache": cache}, timeout_s)}


def measure_budgets(family: str, shares: Sequence[float], clock: str, device: str, seed: int, threads: int) -> Figures:
    """Measure bytes, peak and time of a step under plain torch.compile, and under Adacc at budgets in falling order."""
    torch.set_num_threads(threads)
    model, batch = _model_and_batch(family, device, seed)
    # With a budget in bytes, recomputed values count against the budget. `start_over` sets the share of each region.
    partitioner = AdaccPartitioner(AdaccConfig(memory_budget=2**60), CompiledPolicy(share=1.0))
    installed = InstalledPartitioner(partitioner)
    lowest, compiled = LowestPeak(installed), torch.compile(model)
    trials = []
    for share in (1.0, *shares):
        partitioner.start_over(share)
        installed.compile_again()
        trials.append({"share": share, **_figures(compiled, model, batch, clock, lowest)})
    installed.remove()
    return {"plain": trials[0], "trials": trials[1:]}


def _figures(compiled: Any, model: Any, batch: Batch, clock: str, lowest: LowestPeak) -> Figures:
    _compile(compiled, model, batch, lowest)
    went_back = lowest.keep_lowest()
    if went_back:
        _compile(compiled, model, batch, lowest)
    _step(compiled, model, batch)
    times = [_step_ms(compiled, model, batch, clock) for _ in range(ROUNDS)]
    memory, policy = measure_step(compiled, batch), lowest.installed.partitioner.policy
    return {
        "went_back": went_back,
        "predicted_bytes": policy.stored_bytes,
        "stored_bytes": memory.stored_bytes,
        "modelled_peak_bytes": policy.peak_bytes,
        "graph_peak_bytes": memory.static_bytes + policy.backward_bytes,
        "predicted_peak_bytes": None if policy.code_bytes is None else memory.static_bytes + policy.code_bytes,
        "peak_bytes": memory.peak_bytes,
        "overhead_ms": policy.overhead_ms,
        "step_ms": statistics.median(times),
    }


def _compile(compiled: Any, model: Any, batch: Batch, lowest: LowestPeak) -> None:
    """Run the step that compiles all graphs, and inspect the generated code."""
    loss = forward_loss(compiled, batch)
    lowest.installed.count_calls(loss)
    backward(loss)
    model.zero_grad(set_to_none=True)
    lowest.inspect_code()


def measure_compilation(family: str, name: str, cache: str, device: str, seed: int, threads: int) -> Figures:
    """Measure the CPU seconds of the first step with its compilation, and count the graphs loaded from the cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(threads)
    from torch._dynamo.utils import counters

    model, batch = _model_and_batch(family, device, seed)
    compiled = COMPILED[name]
    if compiled is not None:
        share, actions = compiled
        InstalledPartitioner(AdaccPartitioner(store=PlanStore(), memory_budget=share, actions=actions))
    _step(model, model, batch)
    start = cpu_seconds()
    _step(torch.compile(model), model, batch)
    return {
        "cpu_seconds": cpu_seconds() - start,
        "graphs_from_cache": counters["inductor"]["fxgraph_cache_hit"],
        "joint_graphs_from_cache": counters["aot_autograd"]["autograd_cache_hit"],
    }


def _model_and_batch(family: str, device: str, seed: int) -> tuple[Any, Batch]:
    workload = WORKLOADS[family]
    return workload.model(device, seed), next(workload.batches(device, seed))


def _step(call: Any, model: Any, batch: Batch) -> None:
    backward(forward_loss(call, batch))
    model.zero_grad(set_to_none=True)


def _step_ms(call: Any, model: Any, batch: Batch, clock: str) -> float:
    return 1e3 * seconds_of(partial(_step, call, model, batch), model.device, CLOCKS[clock])


def is_good(point: Figures, device: str) -> bool:
    """Return True if the point was measured and all stored bytes are as predicted."""
    trials = point.get("trials", [])
    return point["status"] == Status.MEASURED.value and num_as_predicted(trials, device) == len(trials)


def num_as_predicted(trials: Sequence[Figures], device: str) -> int:
    """Return the number of trials whose stored bytes equal the prediction."""
    pairs = [(trial["predicted_bytes"], trial["stored_bytes"]) for trial in trials]
    return sum(predicted <= stored and fits_budget(stored, predicted, device) for predicted, stored in pairs)


def peak_errors(point: Figures, predicted: str) -> list[float]:
    """Return the relative errors of the measured peaks against the figure named `predicted`, for trials that have
    it."""
    return [t["peak_bytes"] / t[predicted] - 1.0 for t in point["trials"] if t[predicted] is not None]


def time_ratios(point: Figures) -> list[float]:
    """Return each trial's step time divided by the sum of plain torch.compile's step time and the plan's overhead."""
    return [t["step_ms"] / (point["plain"]["step_ms"] + t["overhead_ms"]) for t in point["trials"]]


def report_text(ledger: Ledger) -> str:
    """Return the tables of budgets and compile times, and the reasons of points without measurement."""
    measured_points = {key: point for key, point in ledger.points.items() if point["status"] == Status.MEASURED.value}
    budgets = {key: point for key, point in measured_points.items() if "trials" in point}
    compilations = {key: point for key, point in measured_points.items() if "cpu_seconds" in point}
    parts = []
    if budgets:
        parts += [
            "Steps through Inductor; budgets fall from the first to the last. If the code for a budget has a higher "
            "peak than the code for a larger budget, the latter is kept. Peaks are predicted from the compiled code, "
            "and earlier from the backward graph. Predicted times are plain torch.compile's plus the plans' overhead:",
            markdown_table([_budgets_row(key, point, ledger.settings.device) for key, point in budgets.items()]),
            *(table for key, point in budgets.items() for table in (f"Peaks of {key}:", _peaks_table(point))),
        ]
    if compilations:
        parts += [
            "CPU seconds of the first step, with an empty cache and then, in a new process, with a full one:",
            markdown_table(_compilation_rows(compilations)),
        ]
    reasons = [f"- {reason}" for reason in ledger.reasons()]
    return "\n\n".join([*parts, *(["Not measured:", "\n".join(reasons)] if reasons else [])]) + "\n"


def _budgets_row(key: str, point: Figures, device: str) -> dict[str, str]:
    trials, ratios = point["trials"], time_ratios(point)
    peaks = [trial["peak_bytes"] for trial in trials]
    steps = [trial["step_ms"] / point["plain"]["step_ms"] for trial in trials]
    return {
        "model": key.partition(",")[0],
        "budgets": str(len(trials)),
        "bytes as predicted": f"{num_as_predicted(trials, device)} of {len(trials)}",
        "higher peak at a smaller budget": str(sum(later > earlier for earlier, later in pairwise(peaks))),
        "kept a larger one's code": str(sum(trial["went_back"] for trial in trials)),
        "peak over the code's, %": _range(peak_errors(point, "predicted_peak_bytes")),
        "peak over the graph's, %": _range(peak_errors(point, "graph_peak_bytes")),
        "step over plain torch.compile's": f"{min(steps):.2f} to {max(steps):.2f}",
        "step over predicted": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }


def _range(errors: list[float]) -> str:
    return f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f}" if errors else "not known"


def _peaks_table(point: Figures) -> str:
    rows = [
        {
            "budget, of torch.compile's bytes": f"{trial['share']:.3f}",
            "stored, MiB": f"{trial['stored_bytes'] / 2**20:.2f}",
            "predicted peak, MiB": _mib(trial["predicted_peak_bytes"]),
            "measured peak, MiB": _mib(trial["peak_bytes"]),
        }
        for trial in point["trials"]
    ]
    return markdown_table(rows)


def _mib(nbytes: int | None) -> str:
    return "not known" if nbytes is None else f"{nbytes / 2**20:.3f}"


def _compilation_rows(points: dict[str, Figures]) -> list[dict[str, str]]:
    base = next((point["cpu_seconds"] for key, point in points.items() if key.endswith(next(iter(COMPILED)))), None)
    rows = []
    for key, point in points.items():
        again = point["again"]
        is_measured = "cpu_seconds" in again
        rows.append(
            {
                "graph": key.rpartition("compilation, ")[2],
                "compiled": f"{point['cpu_seconds']:.1f}",
                "x torch.compile": "" if base is None else f"{point['cpu_seconds'] / base:.2f}",
                "again": f"{again['cpu_seconds']:.1f}" if is_measured else again["status"],
                "graphs from the cache": str(again["graphs_from_cache"]) if is_measured else "",
                "joint graphs from the cache": str(again["joint_graphs_from_cache"]) if is_measured else "",
            }
        )
    return rows


def save_plot(ledger: Ledger) -> None:
    """Plot measured peaks against budgets, both as fractions of plain torch.compile's."""
    series = {
        key.partition(",")[0]: [(t["share"], t["peak_bytes"] / point["plain"]["peak_bytes"]) for t in point["trials"]]
        for key, point in ledger.points.items()
        if "trials" in point
    }
    path = ledger.settings.output.with_suffix(".svg")
    curves(path, series, "budget, x torch.compile's bytes", "peak, x torch.compile's")


log = logging.getLogger(__name__)


class LowestPeak:
    """Selection among the compiled codes of falling shares: if the code of a larger share has a lower peak, that
    code is used."""

    def __init__(self, installed: InstalledPartitioner) -> None:
        self.installed = installed
        self._inspected_policies: list[CompiledPolicy] = []
        """Policies whose code was inspected."""

    def inspect_code(self) -> None:
        """Inspect the generated code. Call this after a step whose calls were counted."""
        self.installed.inspect_code()
        policy = self.installed.partitioner.policy
        if not self._inspected_policies or self._inspected_policies[-1] is not policy:
            self._inspected_policies.append(policy)

    def keep_lowest(self) -> bool:
        """Go back to the code with the lowest peak of this share and all larger shares, unless this share's code has
        the lowest peak. Return True if all graphs must be compiled again.

        Inductor orders and fuses operators by its own rules. Therefore the peak is known only from the generated code,
        and a smaller share may have a higher peak. A larger share's code is also faster.
        """
        policy = self.installed.partitioner.policy
        larger = [other for other in self._inspected_policies if _share(other) >= _share(policy)]
        others = [(other.code_bytes, other) for other in larger if other.code_bytes is not None]
        if policy.code_bytes is None or not others:
            return False
        lowest_bytes, lowest = min(others, key=lambda pair: pair[0])
        if lowest_bytes > policy.code_bytes or _stored(lowest) == _stored(policy):
            return False
        log.info(
            "Adacc: the compiled code for a share of %.3f has a peak of %s in a step, the code for a share of %.3f "
            "only %s: using the latter",
            _share(policy),
            format_bytes(policy.code_bytes),
            _share(lowest),
            format_bytes(lowest_bytes),
        )
        self.installed.partitioner.start_over(lowest.share, lowest.regions)
        self.installed.compile_again()
        return True


def _share(policy: CompiledPolicy) -> float:
    """Return the fraction that the regions were allowed, or 0 if they store the least possible."""
    return 0.0 if policy.share is None else policy.share


def _stored(policy: CompiledPolicy) -> list[tuple[tuple[str, Choice], ...]]:
    return [plan.stored for plan in policy.regions]


if __name__ == "__main__":
    sys.exit(main())
