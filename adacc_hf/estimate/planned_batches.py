"""Micro-batches by bytes for a file of sample lengths: sizes, peak, padding and time (`adacc plan --batches FILE`)."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import Shapes, joined
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.estimate.fake_model import fake_model
from adacc_hf.estimate.planning import Request, TrainingPlanner
from adacc_hf.reports.text_table import table_lines
from adacc_hf.solve.batch_costs import BatchCosts, longest_fitting
from adacc_hf.solve.batch_plan import padding, plan_step

log = logging.getLogger(__name__)

TRACED = ((4, 4), (2, 8), (2, 4), (8, 2), (3, 2), (6, 6), (5, 4))
"""Traced sizes, from which the others are predicted: numbers of samples, and lengths in eighths of the longest. Large
sizes have tiles, and at any longest length five sizes are alike in that."""


@dataclass(frozen=True, kw_only=True)
class PlannedBatches:
    """Totals of the micro-batches of a run over all samples."""

    num_steps: int
    num_batches: int
    num_samples: dict[int, int]
    """Number of micro-batches by their number of samples."""
    tokens: int
    padded_tokens: int
    peak_bytes: int
    """Largest predicted peak: the plain one, or the budget, where a policy is made to meet it."""
    ms: float
    """Predicted time of the blocks' forward and backward, with recomputation."""

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.padded_tokens


@dataclass(frozen=True, kw_only=True)
class BatchesReport:
    """Micro-batches of a file of lengths: by bytes, and of one number of samples."""

    by_bytes: PlannedBatches
    fixed: PlannedBatches | None
    """Batches of the largest number of samples at which the longest ones fit. None if not even one fits."""
    num_too_long: int
    """Number of samples that do not fit even alone. They are left out."""
    longest: int
    """Largest length of a sample that fits."""


def read_lengths(path: str | Path) -> list[int]:
    """Return the whole numbers in the text file `path`: one for each sample, separated by white space, commas or
    brackets. Raises ValueError for anything else."""
    if not Path(path).is_file():
        raise ValueError(f"--batches={path}: there is no such file. It has the length of each sample, in tokens")
    words = re.sub(r"[\[\],;]", " ", Path(path).read_text(encoding="utf-8", errors="replace")).split()
    wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), None if words else "")
    if wrong is not None:
        text = f"{wrong[:40]!r} is not a length: write the lengths of samples in tokens, each at least 1, such as"
        raise ValueError(f"--batches={path}: {text} 57 1204 8")
    return [int(word) for word in words]


def planned_batches(request: Request, lengths: list[int]) -> BatchesReport:
    """Return the micro-batches of steps on `request.batch_size` samples, drawn in a random order from all, and
    truncated to `request.seq_len`.

    Raises the errors of `planning.plan`, and ValueError for images, which have a size of their own.
    """
    if request.workload.images:
        raise ValueError("--batches plans text only: leave out --images")
    lengths = [min(length, request.seq_len) for length in lengths]
    log.info("building %s without memory", request.model)
    with fake_model(request.workload) as model:
        planner = TrainingPlanner(replace(request, accumulates=True), model)
        planner.check_budget()
        unit = max(1, max(lengths) // 8)
        log.info("tracing %d sizes", len(TRACED))
        profiles = [planner.profile_at(number, eighths * unit) for number, eighths in TRACED]
    return _divided(joined(profiles), request, lengths)


def _divided(profile: Profile, request: Request, lengths: list[int]) -> BatchesReport:
    costs = BatchCosts(profile, request.workload.adacc, request.budget)
    names = profile.measured[0][0]

    def sample(length: int) -> Shapes:
        return tuple((name, (1, length) if len(size) > 1 else (1,)) for name, size in names)

    def ms(number: int, longest: tuple[int, ...]) -> float | None:
        return costs.ms(number, sample(longest[0]))

    longest = max(lengths)
    if ms(1, (longest,)) is None and not costs.fits_alone(sample(longest)):
        longest = longest_fitting(costs, sample, longest)
    fitting = [(length,) for length in lengths if length <= longest]
    random.Random(0).shuffle(fitting)
    steps = [fitting[n : n + request.batch_size] for n in range(0, len(fitting), request.batch_size)]

    def totals(groups_of: list[list[list[int]]]) -> PlannedBatches:
        sums = [padding(groups, step) for groups, step in zip(groups_of, steps, strict=True)]
        sizes = [
            (len(group), max(step[index] for index in group))
            for groups, step in zip(groups_of, steps, strict=True)
            for group in groups
        ]
        return PlannedBatches(
            num_steps=len(steps),
            num_batches=len(sizes),
            num_samples=dict(sorted(Counter(number for number, _ in sizes).items())),
            tokens=sum(tokens for tokens, _ in sums),
            padded_tokens=sum(padded for _, padded in sums),
            peak_bytes=max(costs.peak(number, sample(each[0])) or 0 for number, each in sizes),
            ms=sum(ms(*size) or 0.0 for size in sizes),
        )

    by_bytes = totals([plan_step(step, ms) for step in steps])
    number = next((n for n in range(request.batch_size, 0, -1) if ms(n, (longest,)) is not None), 0)
    slices = [[list(range(n, min(n + number, len(step)))) for n in range(0, len(step), number or 1)] for step in steps]
    return BatchesReport(
        by_bytes=by_bytes,
        fixed=totals(slices) if number else None,
        num_too_long=len(lengths) - len(fitting),
        longest=longest,
    )


def batches_text(request: Request, report: BatchesReport) -> str:
    """Return the micro-batches as a text table, next to those of a fixed number of samples."""
    columns = [("by bytes", report.by_bytes)]
    if report.fixed is not None:
        columns.insert(0, (f"fixed, {max(report.fixed.num_samples)} samples", report.fixed))
    base = columns[0][1]
    rows = [
        ("", *(name for name, _ in columns)),
        ("micro-batches per step", *(f"{each.num_batches / each.num_steps:.1f}" for _, each in columns)),
        ("samples per micro-batch", *(_range_text(each) for _, each in columns)),
        ("padding", *(f"{each.padding_share:.0%}" for _, each in columns)),
        ("largest predicted peak", *(format_bytes(each.peak_bytes) for _, each in columns)),
        ("blocks' ms per 1,000 tokens", *(f"{1e3 * each.ms / each.tokens:.2f}" for _, each in columns)),
        (f"of {columns[0][0]}", *(f"{each.ms / base.ms:.2f}" for _, each in columns)),
    ]
    title = (
        f"{request.model}: {base.num_steps} steps of {request.batch_size} samples, the longest of {report.longest} "
        f"tokens, within {format_bytes(request.budget)} per device, on {request.workload.device.title}"
    )
    too_long = (
        f"{report.num_too_long} samples are left out, because they do not fit even alone: the longest that fits has "
        f"{report.longest} tokens"
    )
    return "\n".join(
        [
            title,
            *([too_long] if report.num_too_long else []),
            "",
            *table_lines(rows, right=range(1, len(rows[0]))),
        ]
    )


def _range_text(batches: PlannedBatches) -> str:
    least, most = min(batches.num_samples), max(batches.num_samples)
    return str(most) if least == most else f"{least} to {most}"
