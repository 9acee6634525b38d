"""Error that each codec causes in the gradient of a trained model. The loss of a small run hardly distinguishes codecs.

A GPT-2 with eager attention is trained on bytes. Then the gradient of some batches is computed with the saved tensors
of the blocks compressed, and compared with the exact gradient by relative L2 error, with all parameters as one vector.
The decoded saved tensors are compared with the originals in the same way. `codec_schemes` defines which tensors are
compressed under each scheme.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from adacc_hf import Action, Policy, apply_policy, profile_model
from adacc_hf.eval.records.command_line import positive_int
from adacc_hf.eval.records.ledger import Ledger
from adacc_hf.eval.records.records import Figures
from adacc_hf.eval.repository.codec_schemes import (
    GROUP_SIZES,
    LAYER_SPECIFIC,
    RoundTrips,
    Scheme,
    codec_schemes,
    layer_specific_schemes,
    with_options,
)
from adacc_hf.eval.trials.gradients import Gradients, compute_gradients, relative_error
from adacc_hf.eval.trials.workload import Batch, Workload
from adacc_hf.reports.run_record import Settings, markdown_table
from adacc_hf.solve.simple_policies import uniform_policy

WORKLOAD = Workload(width=128, layers=4, batch=16, tokens=128, attention="eager")
LEARNING_RATE = 1e-3

TRAINING = "gradient, training"
"""Key of the point that all schemes share: the trained model's loss, and the gradient's difference between two
batches."""

Errors = Mapping[Scheme, float]


def add_probing(parser: argparse.ArgumentParser) -> None:
    """Add the options for measuring gradients to the parser."""
    parser.add_argument(
        "--steps", type=positive_int, default=200, help="training steps before the gradients are computed"
    )
    parser.add_argument(
        "--batches", type=positive_int, default=3, help="batches whose errors are averaged (root mean square)"
    )


def probing_info(arguments: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    return {"workload": asdict(workload), "steps": arguments.steps, "batches": arguments.batches}


def measure(ledger: Ledger, workload: Workload) -> None:
    """Measure the point TRAINING, and one point for every scheme."""
    probe = Probe(workload, ledger.run_info["steps"], ledger.run_info["batches"], ledger.settings)
    ledger.measure(TRAINING, lambda: {"final_loss": probe.loss, "another_batch": probe.another_batch()})
    for scheme in tqdm(codec_schemes(), desc="codecs", unit="scheme"):
        ledger.measure(_key(scheme), partial(_point, scheme, probe.codec_errors))
    for scheme in tqdm(layer_specific_schemes(), desc=LAYER_SPECIFIC, unit="scheme"):
        ledger.measure(_key(scheme), partial(_point, scheme, probe.policy_error))


def _point(scheme: Scheme, errors: Callable[[Scheme], Figures]) -> Figures:
    return {**asdict(scheme), **errors(scheme)}


def _key(scheme: Scheme) -> str:
    return "gradient, " + ", ".join([scheme.name, *(f"{name}={value}" for name, value in scheme.options.items())])


class Probe:
    """Trained model, batches and their exact gradients. All are computed on first use, because a resumed run may
    need none of them."""

    def __init__(self, workload: Workload, steps: int, num_batches: int, settings: Settings) -> None:
        self.workload, self.steps, self.num_batches, self.settings = workload, steps, num_batches, settings

    @cached_property
    def _trained_model(self) -> tuple[PreTrainedModel, float, list[Batch]]:
        batches = self.workload.batches(self.settings.device, self.settings.seed)
        model, loss = train(self.workload, batches, self.steps, self.settings)
        return model, loss, list(islice(batches, self.num_batches + 1))

    @property
    def loss(self) -> float:
        return self._trained_model[1]

    @cached_property
    def _exact_gradients(self) -> list[Gradients]:
        model, _, probes = self._trained_model
        return [compute_gradients(model, batch, self.settings.seed) for batch in probes]

    @cached_property
    def _policy(self) -> Policy:
        model, _, probes = self._trained_model
        return uniform_policy(profile_model(model, probes[0]), Action.COMPRESS)

    def another_batch(self) -> float:
        """Return the relative difference between the gradients of two batches."""
        return root_mean_square([relative_error(*pair) for pair in pairwise(self._exact_gradients)])

    def codec_errors(self, scheme: Scheme) -> dict[str, float]:
        """Return the errors of the gradient and of the saved tensors, if one codec encodes all tensors that blocks
        save."""
        with RoundTrips(self._trained_model[0], scheme) as hooks:
            error = self._error()
        assert hooks.num_tensors, f"{scheme} encoded no tensor"
        return {"error": error, "round_trip_error": hooks.error}

    def policy_error(self, scheme: Scheme) -> dict[str, float | None]:
        """Return the error of the gradient under a policy in which each activation has the codec of its layer.

        The error of the saved tensors is None, because a policy gives no access to the decoded tensors.
        """
        with apply_policy(self._trained_model[0], with_options(self._policy, scheme)):
            return {"error": self._error(), "round_trip_error": None}

    def _error(self) -> float:
        """Return the root mean square error over all batches but the last."""
        model, _, probes = self._trained_model
        gradients = [compute_gradients(model, batch, self.settings.seed) for batch in probes[:-1]]
        return root_mean_square([relative_error(*pair) for pair in zip(self._exact_gradients, gradients, strict=False)])


def train(
    workload: Workload, batches: Iterator[Batch], steps: int, settings: Settings
) -> tuple[PreTrainedModel, float]:
    """Train a model for `steps` steps of AdamW. Return the model and its last loss."""
    model = workload.model(settings.device, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(settings.seed)
    loss = torch.tensor(float("nan"))
    for batch in tqdm(islice(batches, steps), total=steps, desc="training", unit="step", leave=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, loss.item()


def root_mean_square(values: Sequence[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def report_text(ledger: Ledger) -> str:
    """Return the tables of both errors as Markdown."""
    info, training = ledger.run_info, ledger.points[TRAINING]
    rows = [point for key, point in ledger.points.items() if key.startswith("gradient, ") and key != TRAINING]
    schemes = {_scheme(row): row for row in rows}
    errors = {scheme: row["error"] for scheme, row in schemes.items()}
    trips = {s: row["round_trip_error"] for s, row in schemes.items() if row["round_trip_error"] is not None}
    where = f"{Workload(**info['workload'])}, after {info['steps']} steps (loss {training['final_loss']:.3f})"
    parts = [
        f"Relative L2 error of the whole gradient, {where}",
        table_text(errors),
        f"The gradient of another batch: {training['another_batch']:.2f}",
        "Relative L2 error of the tensors that the blocks save, after encoding and decoding:",
        table_text(trips),
    ]
    return "\n\n".join(parts) + "\n"


def _scheme(row: Mapping[str, Any]) -> Scheme:
    return Scheme(**{name: row[name] for name in Scheme.__dataclass_fields__})


def table_text(errors: Errors) -> str:
    """Return one line per codec, scale and rounding, with one column per group size."""
    lines = dict.fromkeys((scheme.name, scheme.scale, scheme.rounding) for scheme in errors)
    columns: dict[int | None, str] = {None: "one per row", **{size: f"groups of {size}" for size in GROUP_SIZES}}
    rows = []
    for name, scale, rounding in lines:
        cells = {
            title: errors.get(Scheme(name=name, scale=scale, group_size=size, rounding=rounding))
            for size, title in columns.items()
        }
        figures = {title: "" if error is None else f"{error:.3f}" for title, error in cells.items()}
        rows.append({"codec": name, "scale": scale or "", "rounding": rounding or "", **figures})
    return markdown_table(rows)
