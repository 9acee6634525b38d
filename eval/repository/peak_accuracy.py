"""Error of predicted peaks of live bytes: five models x attention x precision x budgets.

    adacc eval peak-accuracy

Each model is profiled once. The budgets are evenly spaced, from the least possible peak to just below plain training's
peak. The policy of each budget runs for three steps, whose peaks the allocator measures. In the first two steps blocks
are recorded again, and codecs build their maps of outlier channels. The third step runs like all later steps. The run
fails if the third peak exceeds its budget (on a GPU by more than the allocator's rounding), or if any peak differs from
its prediction by more than 3 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from adacc_hf import AdaccConfig, InfeasibleBudgetError, Policy, Profile, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, positive_int, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.trials.families import ATTENTIONS, FAMILIES, PRECISIONS, Batch, Family, Size, in_precision
from adacc_hf.eval.trials.isolation import run_here
from adacc_hf.eval.trials.limits import fits_budget
from adacc_hf.reports.run_record import Settings, markdown_table
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step

SCALE = 20.0
"""Factor of the similarities, which are at most 1: the usual inverse temperature of contrastive losses."""


class Pairs(nn.Module):
    """Bi-encoder with a contrastive loss: matches the first two thirds of each row with its last third."""

    def __init__(self, encoder: BertModel) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """Return the `loss` of a batch [B, T]. Labels are ignored.

        Labels are a parameter because other families need them.
        """
        split = 2 * input_ids.shape[1] // 3
        parts = input_ids[:, :split], input_ids[:, split:]
        begins, ends = (F.normalize(self.encoder(input_ids=part).last_hidden_state.mean(1)) for part in parts)
        rows = torch.arange(len(begins), device=begins.device)
        return SimpleNamespace(loss=F.cross_entropy(begins @ ends.T * SCALE, rows))


class PairsFamily:
    """Maker of bi-encoders, with the interface of `Family`."""

    def model(self, size: Size, attention: str, device: str = "cpu", seed: int = 0) -> Pairs:
        """Return the model in train mode, with dropout."""
        config = FAMILIES["bert"].config(size)
        assert isinstance(config, BertConfig)
        config._attn_implementation = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = BertModel(config, add_pooling_layer=False)
        return Pairs(encoder).to(device).train()


MODELS: dict[str, Family | PairsFamily] = {**FAMILIES, "pairs": PairsFamily()}
"""Four families, and a bi-encoder whose step calls every block twice."""

TOLERANCE = 0.03
"""Largest accepted relative difference of a measured peak from the prediction: the project's promise."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Predicted and measured peak of one policy, and its budget."""

    family: str
    attention: str
    precision: str
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    first_bytes: int
    """Peak of the first two steps."""

    @property
    def error(self) -> float:
        """Return the excess of the measured peak over the predicted peak, as a fraction of the prediction."""
        return self.measured_bytes / self.predicted_bytes - 1.0

    @property
    def first_error(self) -> float:
        """Return the excess of the peak of the first two steps over the predicted peak, as a fraction of the
        prediction."""
        return self.first_bytes / self.predicted_bytes - 1.0

    @property
    def is_within_budget(self) -> bool:
        return self.measured_bytes <= self.budget_bytes

    def is_good(self, device: str) -> bool:
        is_within_limit = fits_budget(self.measured_bytes, self.budget_bytes, device)
        return is_within_limit and max(abs(self.error), self.first_error) <= TOLERANCE


def main(argv: Sequence[str] | None = None, size: Size | None = None) -> int:
    """Measure, print the table and save the record. Return 1 if a budget was exceeded or a prediction is wrong."""
    parser = runner_parser("peak-accuracy", __doc__)
    for name, choices in (("family", tuple(MODELS)), ("attention", ATTENTIONS), ("precision", PRECISIONS)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=choices, help=f"values of {name} to measure (default: all)"
        )
    parser.add_argument("--budgets", type=positive_int, default=5, help="budgets per model")
    arguments, settings = parse(parser, argv)
    size = size or Size()
    cases = list(product(arguments.family, arguments.attention, arguments.precision))
    run_info = {"cases": cases, "size": asdict(size), "budgets": arguments.budgets, "tolerance": TOLERANCE}
    order = {"size": size, "num_budgets": arguments.budgets, "settings": settings}
    points = {", ".join(case): partial(run_here, _point, order | {"case": case}) for case in cases}
    ledger = run_points(settings, run_info, arguments.resume, lambda _: points, report_text)
    is_good = all(row.is_good(settings.device) for row in _measurements(ledger))
    return 0 if is_good and all("peaks" in point for point in ledger.points.values()) else 1


def _point(case: tuple[str, str, str], size: Size, num_budgets: int, settings: Settings) -> dict[str, Any]:
    rows = measure(*case, size, num_budgets, settings)
    return {"peaks": [asdict(row) | {"error": row.error, "within_budget": row.is_within_budget} for row in rows]}


def _measurements(ledger: Ledger) -> list[Measurement]:
    names = Measurement.__dataclass_fields__
    rows = [row for point in ledger.points.values() for row in point.get("peaks", [])]
    return [Measurement(**{name: row[name] for name in names}) for row in rows]


def measure(
    family: str, attention: str, precision: str, size: Size, num_budgets: int, settings: Settings
) -> list[Measurement]:
    """Measure the peaks of one model at `num_budgets` budgets."""
    model = MODELS[family].model(size, attention, settings.device, settings.seed)
    batch = size.example(settings.device, settings.seed)
    rows = []
    run_in = partial(in_precision, precision, settings.device)
    with run_in():
        profile = profile_model(model, batch, AdaccConfig())
    for budget in peak_budgets(profile, num_budgets):
        policy = solve_policy(profile, budget)
        *first, measured = measured_peaks(model, batch, policy, run_in)
        rows.append(
            Measurement(
                family=family,
                attention=attention,
                precision=precision,
                budget_bytes=budget,
                predicted_bytes=policy.predicted_peak_bytes,
                measured_bytes=measured,
                first_bytes=max(first),
            )
        )
    return rows


def peak_budgets(profile: Profile, num_budgets: int) -> list[int]:
    """Return evenly spaced budgets, from the least possible peak upwards. The last one is one step below plain
    training's peak."""
    floor = least_peak_bytes(profile)
    plain = uniform_policy(profile, Action.RETAIN).predicted_peak_bytes
    return [floor + (plain - floor) * i // num_budgets for i in range(num_budgets)]


def least_peak_bytes(profile: Profile) -> int:
    """Return the smallest feasible budget on the peak."""
    try:
        return solve_policy(profile, 1).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        return error.smallest_budget_bytes


def measured_peaks(
    model: nn.Module, batch: Batch, policy: Policy, precision: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[int]:
    """Measure the peak bytes of each of the first three steps under `policy`."""
    peaks = []
    with apply_policy(model, policy):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            with precision():  # entered for each step, since autocast caches the casts of weights until it exits
                peaks.append(measure_step(model, batch).peak_bytes)
    return peaks


def report_text(ledger: Ledger) -> str:
    """Return the table as Markdown, its largest errors, and the reasons of points without measurement."""
    rows = _measurements(ledger)
    return "\n\n".join([*([table_text(rows), summary(rows)] if rows else []), *ledger.reasons()]) + "\n"


def summary(rows: Sequence[Measurement]) -> str:
    """Return a line with the largest errors and the number of exceeded budgets."""
    worst = max(rows, key=lambda row: abs(row.error))
    over = [row for row in rows if not row.is_within_budget]
    return (
        f"{len(rows)} policies: the measured peak lies at most {100 * abs(worst.error):.2f} % from the predicted one "
        f"({worst.family}, {worst.attention}, {worst.precision}), that of the first two steps at most "
        f"{100 * max(row.first_error for row in rows):.2f} % above it; {len(over)} above their budget."
    )


def table_text(rows: Sequence[Measurement]) -> str:
    """Return one line per model: the ranges of budgets and errors, and the number of budgets that were met."""
    cases: dict[tuple[str, str, str], list[Measurement]] = {}
    for row in rows:
        cases.setdefault((row.family, row.attention, row.precision), []).append(row)
    return markdown_table([_cells(*case, measurements) for case, measurements in cases.items()])


def _cells(family: str, attention: str, precision: str, rows: Sequence[Measurement]) -> dict[str, Any]:
    errors = [100 * row.error for row in rows]
    first = [100 * row.first_error for row in rows]
    return {
        "model": f"{family}, {attention}, {precision}",
        "budgets": f"{format_bytes(rows[0].budget_bytes)} to {format_bytes(rows[-1].budget_bytes)}",
        "measured over predicted, %": f"{min(errors):+.2f} to {max(errors):+.2f}",
        "in the first two steps, %": f"{min(first):+.2f} to {max(first):+.2f}",
        "used of the budget, %": " ".join(f"{100 * row.measured_bytes / row.budget_bytes:.1f}" for row in rows),
        "within budget": f"{sum(row.is_within_budget for row in rows)} of {len(rows)}",
    }


if __name__ == "__main__":
    sys.exit(main())
