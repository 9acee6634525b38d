"""Memory at sizes of batch that were never profiled: what is predicted of them, and what a budget in bytes keeps.

    adacc eval sizes

Each model is profiled at one size. At sizes drawn at random, policies are solved for what the profile tells of them and
followed, and the bytes that they store and their peaks are measured by the allocator. Then the Trainer trains the model
on batches of random sizes, the largest of all late, under a budget in bytes. The peak of every step is measured: one
above the budget must have been said before its batch ran. Fails if other bytes are stored than predicted, if a peak is
more than 3 % away, or if a step exceeds the budget unsaid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback

from adacc_hf import AdaccCallback, AdaccConfig, Profile, apply_policy, profile_model, solve_policy
from adacc_hf.adapt.steps import StepMeter
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.length_trainings import SizedBatches, train_on
from adacc_hf.eval.peak_accuracy import TOLERANCE, least_peak_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.plots import curves
from adacc_hf.eval.records.records import Figures, Settings, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.length_cases import LENGTH_CASES, LengthCase, Scale, Size
from adacc_hf.eval.trials.limits import keeps_to
from adacc_hf.eval.trials.workload import Batch
from adacc_hf.price.other_sizes import at_size
from adacc_hf.torch_glue.batch_shapes import batch_shapes, describe, from_plain, to_plain
from adacc_hf.torch_glue.memory import measure_step

CASES = ("gpt2", "llama_padded", "t5", "bert")
SCALE = Scale(width=64, layers=4, batch=4, shortest=24, longest=160, steps=1000)
CONFIG = AdaccConfig(min_compress_bytes=4096, max_error=0.1)
"""Activations of so small a model are compressed as well."""

LONGER = 1.25
"""The largest batch that the budget of a training has room for, by its tokens over those of all before it."""
TOO_LONG = 2.0
"""The same of a batch that it has none for."""
LARGEST_AT, TOO_LARGE_AT = 0.9, 0.95
"""When these come, as a part of the training."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was told of one size, and what came of it."""

    size: tuple[int, ...]
    """Samples, and tokens of each text."""
    predicted_stored_bytes: int
    measured_stored_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int

    @property
    def peak_error(self) -> float:
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1.0


def main(argv: Sequence[str] | None = None, scale: Scale = SCALE) -> int:
    """Measure every model, print the tables, save record, tables and plot. Returns 1 if one does not keep its word."""
    parser = argparse.ArgumentParser(prog="adacc eval sizes", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES), help="which models")
    parser.add_argument("--sizes", type=positive_int, default=20, help="sizes to predict, for each model")
    parser.add_argument("--steps", type=positive_int, help=f"batches of each training (default: {SCALE.steps})")
    add_resume(parser)
    add_settings(parser, "sizes")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    scale = replace(scale, steps=arguments.steps or scale.steps)
    run_info = {"scale": asdict(scale), "cases": arguments.cases, "sizes": arguments.sizes, "tolerance": TOLERANCE}
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name in tqdm(arguments.cases, desc="sizes", unit="model"):
            ledger.measure(name, partial(measure, LENGTH_CASES[name], scale, arguments.sizes, settings))
        faults = [f"{name}: {fault}" for name, point in ledger.points.items() for fault in faults_of(point, settings)]
        ledger.finish(faults=faults)
        save_plot(ledger)
        ledger.publish(report_text(ledger))
    return 1 if faults else 0


def measure(case: LengthCase, scale: Scale, num_sizes: int, settings: Settings) -> Figures:
    """The figures of one model."""
    scale = replace(scale, longest=int(scale.longest * TOO_LONG))  # positions for the longest batch
    draw = _Draw(case, scale, settings.seed)
    profiled = draw.sized(scale.batch, round(scale.longest / TOO_LONG * 0.75))
    model = case.model(scale, settings.device, settings.seed)
    profile = profile_model(model, draw.batch(profiled, settings.device, 0), CONFIG, all_sizes=True)
    sizes = [draw.size(least_samples=2) for _ in range(num_sizes)]
    rows = [_told(model, profile, size, draw.batch(size, settings.device, 0)) for size in sizes]
    del model
    return {
        "profiled": profiled,
        "told": [asdict(row) for row in rows],
        "training": asdict(train(case, draw, scale, profile, settings)),
    }


class _Draw:
    """Batches of random sizes of one model."""

    def __init__(self, case: LengthCase, scale: Scale, seed: int) -> None:
        self._case, self._scale = case, scale
        self._generator = torch.Generator().manual_seed(seed)
        self._most_tokens = round(scale.longest / TOO_LONG)

    def size(self, least_samples: int = 1) -> Size:
        """A number of samples, and of tokens of each text."""
        return (self._number(least_samples, self._scale.batch), *self._lengths())

    def sized(self, samples: int, tokens: int) -> Size:
        """The size of a batch whose texts are all of so many tokens."""
        return (samples, *[tokens] * len(self._lengths()))

    def _lengths(self) -> Size:
        tokens = self._number(self._scale.shortest, self._most_tokens)
        other = self._number(self._scale.shortest, self._most_tokens)
        (drawn,) = self._case.sizes([tokens], self._generator)
        return (tokens, other)[: len(drawn)]

    def _number(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self._generator))

    def batch(self, size: Size, device: str, seed: int) -> Batch:
        samples, *tokens = size
        return self._case.make_batch(replace(self._scale, batch=samples), tuple(tokens), device, seed)


def _told(model: PreTrainedModel, profile: Profile, size: Size, batch: Batch) -> Told:
    """A policy for half of what plain training stores at `size`: its bytes as predicted, and those of its third step.

    In the first two, codecs make their maps of outlier channels.
    """
    policy = solve_policy(at_size(profile, to_plain(batch_shapes(batch))), 0.5, CONFIG)
    with apply_policy(model, policy):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            measured = measure_step(model, batch)
    return Told(
        size=size,
        predicted_stored_bytes=policy.predicted_stored_bytes,
        measured_stored_bytes=measured.stored_bytes,
        predicted_peak_bytes=policy.predicted_peak_bytes,
        measured_peak_bytes=measured.peak_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training under a budget in bytes."""

    budget_bytes: int
    steps: int
    num_sizes: int
    """Different ones among its batches."""
    largest_step: int
    """The step of the largest batch that the budget has room for, and its peak."""
    largest_peak_bytes: int
    over: list[dict[str, Any]]
    """Steps above the budget: their number, size and peak, and whether that was said before."""
    peaks: list[int]
    """Of every step."""


class MeteredCallback(AdaccCallback):
    """Adacc's callback, with what its own count of a step says: an allocator can be asked by one at a time."""

    @property
    def meter(self) -> StepMeter | None:
        """Its meter, once there is a policy."""
        evolution = getattr(self.session and self.session.phase, "evolution", None)
        return None if evolution is None else evolution._meter

    @property
    def has_left(self) -> bool:
        """Whether calls of the last micro-batch ran otherwise than a policy says."""
        handle = getattr(self.session and self.session.phase, "handle", None)
        return handle is not None and bool(handle.library.fallbacks)


class StepPeaks(TrainerCallback):
    """The peak of every step until the optimizer runs, its batch left out. It stands behind Adacc's callback."""

    def __init__(self, adacc: MeteredCallback) -> None:
        self.peaks: list[int] = []
        self.left: list[bool] = []
        """Whether blocks ran otherwise than their policy says."""
        self._adacc, self._own = adacc, StepMeter()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any):
        self._own.begin()
        if self._adacc.meter is None or not self._adacc.meter.is_counting:
            self._own.count_memory(model, optimizer)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._own.backward_is_over()
        meters = [meter for meter in (self._own, self._adacc.meter) if meter is not None]
        self.peaks.append(next(meter.peak_bytes for meter in meters if meter.peak_bytes is not None))
        self.left.append(self._adacc.has_left)


def train(case: LengthCase, draw: _Draw, scale: Scale, profile: Profile, settings: Settings) -> Trained:
    """Train on random sizes under a budget that has room for one batch that is larger than the others, and late."""
    tokens = round(scale.longest / TOO_LONG)
    largest, too_large = (draw.sized(scale.batch, round(tokens * ratio)) for ratio in (LONGER, TOO_LONG))
    sizes = [draw.size() for _ in range(scale.steps)]
    places = [int(part * scale.steps) for part in (LARGEST_AT, TOO_LARGE_AT)]
    for place, size in zip(places, (largest, too_large), strict=True):
        sizes[place] = size
    model = case.model(scale, settings.device, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state_bytes = sum(2 * p.nbytes for p in model.parameters())  # AdamW's, which was not there in the profile
    batch = draw.batch(largest, settings.device, 0)
    budget = least_peak_bytes(at_size(profile, to_plain(batch_shapes(batch))), CONFIG) + state_bytes
    budget = round(budget * 1.02)  # what the Trainer's step takes beside the model's is no part of the profile
    adacc = MeteredCallback(replace(CONFIG, memory_budget=budget))
    measured = StepPeaks(adacc)
    data = SizedBatches(draw.batch, sizes, settings.seed)
    train_on(model, data, [adacc, measured], settings, _InOrder, optimizer)
    batches = [draw.batch(size, "cpu", 0) for size in sizes]
    peaks = [
        peak + sum(tensor.nbytes for tensor in batch.values())
        for peak, batch in zip(measured.peaks, batches, strict=True)
    ]
    over = [
        {"step": step, "size": size, "peak_bytes": peak, "said": _was_said(adacc, step, batch, left)}
        for step, (size, peak, batch, left) in enumerate(
            zip(sizes, peaks, batches, measured.left, strict=True), start=1
        )
        if not keeps_to(peak, budget, settings.device)
    ]
    return Trained(
        budget_bytes=budget,
        steps=len(sizes),
        num_sizes=len(set(sizes)),
        largest_step=places[0] + 1,
        largest_peak_bytes=peaks[places[0]],
        over=over,
        peaks=peaks,
    )


class _InOrder(Trainer):
    """Trains on the batches as they come."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        assert isinstance(self.train_dataset, SizedBatches)
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _was_said(adacc: MeteredCallback, step: int, batch: Batch, has_left: bool) -> bool:
    """Whether the run said that batches of this size, or that leave their plans as this one `has_left` them, need more
    than the budget, or may, before the step was over."""
    shapes = batch_shapes(batch)
    known = [describe(shapes)]
    if adacc.profile is not None and adacc.profile.sizes is not None:
        found = adacc.profile.sizes.class_of(to_plain(shapes))
        known += [] if found is None else [describe(from_plain(found))]
    reasons = [event.get("reason", "") for event in adacc.history if event["step"] <= step]
    beginnings = tuple(f"batches of {text} {verb} " for text in known for verb in ("need", "may take more than"))
    is_said = any(reason.startswith(beginnings) for reason in reasons)
    return is_said or (has_left and any("ran otherwise than a policy says" in reason for reason in reasons))


def faults_of(point: Figures, settings: Settings) -> list[str]:
    """What one model promised and did not keep."""
    rows = [_row(told) for told in point["told"]]
    faults = [
        f"at {row.size} {row.measured_stored_bytes} bytes were stored, {row.predicted_stored_bytes} were predicted"
        for row in rows
        if row.measured_stored_bytes != row.predicted_stored_bytes
    ]
    faults += [
        f"at {row.size} the peak lies {100 * row.peak_error:+.2f} % from the predicted one"
        for row in rows
        if abs(row.peak_error) > TOLERANCE
    ]
    unsaid = [step for step in point["training"]["over"] if not step["said"]]
    return faults + [
        f"step {s['step']} of {s['size']} took {s['peak_bytes']} bytes and nothing was said" for s in unsaid
    ]


def _row(told: dict[str, Any]) -> Told:
    return Told(**{**told, "size": tuple(told["size"])})


def report_text(ledger: Ledger) -> str:
    """A table of predictions, one of trainings, and what the columns are."""
    told = markdown_table([_told_cells(name, point) for name, point in ledger.points.items()])
    trained = markdown_table([_trained_cells(name, point["training"]) for name, point in ledger.points.items()])
    scale = Scale(**ledger.run_info["scale"])
    text = (
        f"Models of width {scale.width} and {scale.layers} blocks, profiled once each at {scale.batch} samples.\n\n"
        f"Policies for half of what plain training stores, at random sizes of 2 to {scale.batch} samples and "
        f"{scale.shortest} to {scale.longest} tokens that were never profiled:\n\n{told}\n\n"
        f"Trainings under a budget in bytes, on batches of 1 to {scale.batch} samples; one of {LONGER:g} times the "
        f"tokens of all before it comes late, for which the budget has just room, and then one of {TOO_LONG:g} times, "
        f"for which it has none. The peak of every step was measured:\n\n{trained}\n"
    )
    return "\n".join([text, *ledger.summary["faults"]])


def _told_cells(name: str, point: Figures) -> dict[str, str]:
    rows = [_row(told) for told in point["told"]]
    errors = [100 * row.peak_error for row in rows]
    equal = sum(row.measured_stored_bytes == row.predicted_stored_bytes for row in rows)
    return {
        "model": LENGTH_CASES[name].title,
        "profiled at": " x ".join(map(str, point["profiled"])),
        "sizes": str(len(rows)),
        "stored bytes as predicted": f"{equal} of {len(rows)}",
        "peak over predicted, %": f"{min(errors):+.2f} to {max(errors):+.2f}",
    }


def _trained_cells(name: str, training: dict[str, Any]) -> dict[str, str]:
    said = [step for step in training["over"] if step["said"]]
    return {
        "model": LENGTH_CASES[name].title,
        "steps": str(training["steps"]),
        "sizes": str(training["num_sizes"]),
        "budget": format_bytes(training["budget_bytes"]),
        "peak of the largest that fits": format_bytes(training["largest_peak_bytes"]),
        "above it and said": str(len(said)),
        "above it and unsaid": str(len(training["over"]) - len(said)),
    }


def save_plot(ledger: Ledger) -> None:
    """The peak of every step over the budget."""
    series = {}
    for name, point in ledger.points.items():
        training = point["training"]
        shares = [peak / training["budget_bytes"] for peak in training["peaks"]]
        series[LENGTH_CASES[name].title] = list(enumerate(shares, start=1))
    curves(ledger.settings.output.with_suffix(".svg"), series, "optimizer step", "peak over the budget")


if __name__ == "__main__":
    sys.exit(main())
