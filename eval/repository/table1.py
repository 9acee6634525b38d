"""The paper's Table 1 from our own profile: time and freed bytes of recomputing and of compressing every activation.

    adacc eval table1

Recomputation is timed from the nearest activations, with all others stored, as in the paper. The codec shown frees the
most bytes per ms. The action that frees more bytes per ms wins. Unlike this rule, the solver considers the joint cost
of actions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.command_line import parse, runner_parser
from adacc_hf.eval.records.ledger import Ledger, run_points
from adacc_hf.eval.trials.families import ATTENTIONS
from adacc_hf.eval.trials.workload import DEMO, Workload
from adacc_hf.reports.run_record import Settings, markdown_table
from adacc_hf.solve.baselines import Bandwidths, bandwidths
from adacc_hf.solve.milp import KindModel, build_block_model

PAPER = """The paper's Table 1, four tensors of a GPT on its GPU:

| tensor | size, MB | recompute, ms | compression, ms | size after, MB |   wins    |
| ------ | -------: | ------------: | --------------: | -------------: | :-------: |
| T1     |       96 |          0.36 |            0.37 |             24 | recompute |
| T2     |       42 |          1.02 |            0.16 |           11.8 | compress  |
| T3     |       42 |          0.58 |            0.16 |           11.8 | compress  |
| T4     |     10.5 |          0.04 |            0.04 |            2.6 | recompute |
"""


def main(argv: Sequence[str] | None = None, workload: Workload = DEMO) -> int:
    """Profile, print the tables and save the record."""
    parser = runner_parser("table1", __doc__)
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTIONS,
        default=ATTENTIONS,
        help="attention implementations to profile (default: all)",
    )
    arguments, settings = parse(parser, argv)
    cases = [Workload(**{**asdict(workload), "attention": attention}) for attention in arguments.attention]
    points = {f"{case.family}, {case}": partial(measure, case, settings) for case in cases}
    run_info = {"cases": [asdict(case) for case in cases]}
    run_points(settings, run_info, arguments.resume, lambda ledger: points, report_text)
    return 0


def measure(workload: Workload, settings: Settings) -> dict[str, Any]:
    """Return the rows of every kind of block of one model."""
    model = workload.model(settings.device, settings.seed)
    config = AdaccConfig()
    profile = profile_model(model, next(workload.batches(settings.device, settings.seed)), config)
    models = [build_block_model(kind, config) for kind in profile.kinds]
    return {"activations": [row for model in models for row in kind_rows(model)]}


def kind_rows(model: KindModel) -> list[dict[str, Any]]:
    """Return the costs of the actions for each activation that autograd saves, the largest first."""
    kind = model.kind
    rows = [_row(model, kind.names[row.value], row) for row in bandwidths(model) if kind.values[row.value].saved]
    return sorted(rows, key=lambda row: -row["nbytes"])


def _row(model: KindModel, label: str, row: Bandwidths) -> dict[str, Any]:
    value, store = model.kind.values[row.value], row.store
    return {
        "label": label,
        "nbytes": value.nbytes,
        "recompute_ms": row.recompute_ms,
        "recompute_band": row.recompute if row.recompute_ms else None,
        "codec": None if store is None else store.choice.codec,
        "compress_ms": None if store is None else store.ms,
        "payload_bytes": None if store is None else store.nbytes,
        "compress_band": None if store is None else row.compress,
        "winner": row.choice.action.value,
    }


def report_text(ledger: Ledger) -> str:
    """Return a table per model as Markdown, and the paper's."""
    parts = []
    for name, point in ledger.points.items():
        parts += [f"{name}:", markdown_table([_cells(row) for row in point["activations"]])]
    return "\n\n".join([*parts, PAPER])


def _cells(row: dict[str, Any]) -> dict[str, str]:
    def number(name: str, digits: int, scale: float = 1.0) -> str:
        return "-" if row[name] is None else f"{row[name] * scale:.{digits}f}"

    per_second = 1e3 / 1e9
    return {
        "activation": row["label"],
        "size": format_bytes(row["nbytes"]),
        "recompute, ms": number("recompute_ms", 3),
        "compression, ms": number("compress_ms", 3),
        "size after": "-" if row["payload_bytes"] is None else format_bytes(row["payload_bytes"]),
        "codec": row["codec"] or "-",
        "recompute frees, GB/s": number("recompute_band", 2, per_second),
        "compression frees, GB/s": number("compress_band", 2, per_second),
        "wins": row["winner"],
    }


if __name__ == "__main__":
    sys.exit(main())
