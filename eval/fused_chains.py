"""What replay gains if chains of pointwise operators run as one kernel, made by Inductor with eager's rounding.

    adacc eval fused-chains

The chains are those that a block's replay runs when everything is recomputed: GELU's approximations, SwiGLU, casts,
residual sums. Each runs on the tensors of a real backward, as operators and as one kernel in turn. An operator is exact
if a kernel of its own gives its bits for all that it is tried on, at every length and two strides; only chains of exact
operators could stand in a lossless replay. For a GPU there are the bytes that operators and kernels move, counted on
tapes without memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from adacc_hf.artifacts.units import format_bytes
from adacc_hf.eval.records.ledger import Ledger, add_resume, open_ledger
from adacc_hf.eval.records.records import Figures, Settings, Spread, add_settings, markdown_table, positive_int
from adacc_hf.eval.trials.chain_bytes import MODELS, replay_bytes
from adacc_hf.eval.trials.chain_replay import ALL, EXACT, OPERATORS, ChainReplay
from adacc_hf.eval.trials.clock import CLOCKS, add_clock, check_clock
from adacc_hf.eval.trials.exact_kernels import ExactOperators
from adacc_hf.eval.trials.families import FAMILIES, PRECISIONS, in_precision
from adacc_hf.eval.trials.workload import Workload

CASES = {
    Workload(family=family, width=256, layers=2, batch=batch, tokens=256): rounds
    for batch, rounds in ((4, 24), (16, 10))
    for family in FAMILIES
}
"""Timed rounds of each workload."""

NEEDED = 1.5
"""Times faster that the replay of chains has to be, for kernels to be worth their place in the product."""


def main(
    argv: Sequence[str] | None = None,
    cases: Mapping[Workload, int] = CASES,
    models: Sequence[str] = tuple(MODELS),
) -> int:
    """Measure every case, print the tables and save the record."""
    parser = argparse.ArgumentParser(prog="adacc eval fused-chains", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=positive_int, help="timed rounds of every case (default: 24, or 10 of large batches)"
    )
    add_clock(parser)
    add_resume(parser)
    add_settings(parser, "fused_chains")
    arguments = parser.parse_args(argv)
    settings = Settings.from_arguments(arguments)
    check_clock(arguments.clock, settings)
    rounds = {workload: arguments.rounds or default for workload, default in cases.items()}
    cases_info = [{**asdict(workload), "rounds": count} for workload, count in rounds.items()]
    run_info = {"cases": cases_info, "models": list(models), "clock": arguments.clock}
    exact = ExactOperators(settings.seed)
    with open_ledger(settings, run_info, arguments.resume) as ledger:
        for name in models:
            ledger.measure(f"{BYTES}{name}", partial(replay_bytes, name))
        for workload, count in rounds.items():
            for precision in PRECISIONS:
                measured = partial(measure, workload, precision, count, arguments.clock, settings, exact)
                ledger.measure(case_name(workload, precision), measured)
        ledger.finish()
        ledger.publish(report_text(ledger))
    return 0


BYTES = "bytes: "
"""What the names of the points begin with that hold bytes."""


def case_name(workload: Workload, precision: str) -> str:
    return f"{workload.family} {precision}, {workload}"


def measure(
    workload: Workload, precision: str, num_rounds: int, clock: str, settings: Settings, exact: ExactOperators
) -> Figures:
    """The chains of every kind of block, the operators tried for them, and the step with and without kernels."""
    with in_precision(precision, settings.device):
        replay = ChainReplay(workload, settings, CLOCKS[clock], exact)
        with replay.handle:
            return {
                "chains": {variant: replay.chain_figures(variant, num_rounds) for variant in (ALL, EXACT)},
                "operators": exact.shares,
                "step": replay.step_figures(num_rounds // 2 + 1),
            }


# What the figures come to.


def replay_ms(figures: Figures) -> dict[str, float]:
    """Milliseconds that the chains of a case take in one step: as operators, and with kernels of each variant.

    What is in no chain of exact operators runs as operators in the lossless variant. "faster": a chain has a kernel
    only where that is faster.
    """

    def total(variant: str, *ways: str) -> float:
        rows = figures["chains"][variant]
        return sum(row["blocks"] * min(row[way]["median"] for way in ways) for row in rows)

    operators = total(ALL, "operators_ms")
    others = operators - total(EXACT, "operators_ms")
    return {
        OPERATORS: operators,
        ALL: total(ALL, "kernel_ms"),
        f"{ALL}, faster": total(ALL, "operators_ms", "kernel_ms"),
        EXACT: others + total(EXACT, "kernel_ms"),
        f"{EXACT}, faster": others + total(EXACT, "operators_ms", "kernel_ms"),
    }


def times_faster(ledger: Ledger) -> dict[str, dict[str, float]]:
    """By case and variant: how many times faster the replay of its chains is than that of the operators."""
    found = {}
    for name, figures in ledger.points.items():
        if not name.startswith(BYTES):
            spent = replay_ms(figures)
            found[name] = {variant: spent[OPERATORS] / ms for variant, ms in spent.items() if variant != OPERATORS}
    return found


def report_text(ledger: Ledger) -> str:
    """A table of cases with the verdict, one of chains for each case, and one of bytes, as Markdown."""
    cases = {name: figures for name, figures in ledger.points.items() if not name.startswith(BYTES)}
    faster = times_faster(ledger)
    parts = []
    if cases:
        medians = {variant: statistics.median(row[variant] for row in faster.values()) for variant in _VARIANTS}
        rows = [_case_cells(name, cases[name], ratios) for name, ratios in faster.items()]
        last = {"case": "median", **{_VARIANTS[v]: f"{ratio:.2f}" for v, ratio in medians.items()}}
        parts += [
            markdown_table([*rows, dict.fromkeys(rows[0], "") | last]),
            " ".join(_NOTE.split()),
            _operators_table(cases),
        ]
    parts += [_bytes_table(ledger)]
    for name, figures in cases.items():
        parts += [f"{name}:", markdown_table([_chain_cells(rows) for rows in _equal_chains(figures)])]
    return "\n\n".join(parts) + "\n"


_VARIANTS = {
    ALL: "all chains, x",
    f"{ALL}, faster": "where faster, x",
    EXACT: "exact chains, x",
    f"{EXACT}, faster": "exact where faster, x",
}
"""By variant: the head of its column."""

_NOTE = f"""
How many times faster the replay of all chains of a step is with kernels than as operators: sums of medians over the
chains and blocks of a case. Needed: {NEEDED}. Exact chains: kernels for exact operators alone, and all else runs as
operators. Where faster: a chain that its kernel makes slower stays as it is. Step: forward and backward with everything
recomputed, as operators over with kernels, in turn; median, and 20th to 80th percentile of the rounds.
"""


def _case_cells(name: str, figures: Figures, ratios: Mapping[str, float]) -> dict[str, str]:
    rows = figures["chains"][ALL]
    step = figures["step"]
    share = replay_ms(figures)[OPERATORS] / step[OPERATORS]["step_ms"]["median"]
    return {
        "case": name,
        "chains": str(len(rows)),
        "of equal bits here": str(sum(row["differing"] == 0 for row in rows)),
        **{head: f"{ratios[variant]:.2f}" for variant, head in _VARIANTS.items()},
        "share of the step": f"{100 * share:.1f} %",
        "step, all chains, x": Spread(**step[ALL]["faster_by_round"]).text(3),
        "step, exact chains, x": Spread(**step[EXACT]["faster_by_round"]).text(3),
        "gradient error": f"{step[ALL]['gradient_error']:.1e}",
    }


def _by_chain(cases: Mapping[str, Figures]) -> str:
    """Say what comes out if each chain counts the same, however long it takes, and what is in no chain does not."""
    texts = []
    for variant in (ALL, EXACT):
        rows = [row for figures in cases.values() for row in figures["chains"][variant]]
        ratios = [row["operators_ms"]["median"] / row["kernel_ms"]["median"] for row in rows]
        slower = sum(ratio < 1 for ratio in ratios)
        texts.append(
            f"{variant} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; {slower} of "
            f"{len(ratios)} are slower as kernels)"
        )
    return f"Median of single chains, each counted alike: {', '.join(texts)}."


def _operators_table(cases: Mapping[str, Figures]) -> str:
    tried = {name: share for figures in cases.values() for name, share in figures["operators"].items()}
    rows = [{"operator": name, "share of numbers": f"{share:.1e}"} for name, share in tried.items() if share]
    text = f"Of {len(tried)} operators with their constants and dtypes, kernels of these alone give other bits:"
    return f"{text}\n\n{markdown_table(rows)}" if rows else f"All {len(tried)} operators are exact."


def _equal_chains(figures: Figures) -> list[list[dict[str, Any]]]:
    """The chains of a case, those of equal operators and sizes together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in figures["chains"][ALL]:
        groups.setdefault((row["names"], *row["size"]), []).append(row)
    return list(groups.values())


def _chain_cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    row = rows[0]
    old, new = (_pooled([Spread(**row[way]) for row in rows]) for way in ("operators_ms", "kernel_ms"))
    differing, greatest = (max(row[figure] for row in rows) for figure in ("differing", "greatest"))
    return {
        "chain": row["names"],
        "in blocks": str(sum(row["blocks"] for row in rows)),
        "size": " x ".join(map(str, row["size"])),
        "other bits": f"{differing:.1e}" if differing else "none",
        "greatest difference": f"{greatest:.1e}" if greatest else "0",
        "moved": f"{format_bytes(row['bytes_before'])} to {format_bytes(row['bytes_after'])}",
        "operators, ms": old.text(3),
        "kernel, ms": new.text(3),
        "x": f"{old.median / new.median:.2f}",
    }


def _pooled(spreads: Sequence[Spread]) -> Spread:
    """The median of the medians, between the least and the greatest."""
    return Spread(
        low=min(spread.low for spread in spreads),
        median=statistics.median(spread.median for spread in spreads),
        high=max(spread.high for spread in spreads),
    )


def _bytes_table(ledger: Ledger) -> str:
    rows = [
        {
            "model": name.removeprefix(BYTES),
            "policy": policy,
            "operators": f"{row['operators']:.0f}",
            "in chains": f"{row['chained']:.0f}",
            "all replay moves": format_bytes(row["pointwise"] + row["others"]),
            "pointwise": format_bytes(row["pointwise"]),
            "chains": format_bytes(row["before"]),
            "as kernels": format_bytes(row["after"]),
            "saved of all": f"{100 * (row['before'] - row['after']) / max(1, row['pointwise'] + row['others']):.0f} %",
            "overhead of a step, ms": f"{row['overhead_ms']:.1f} of {row['step_ms']:.0f}",
            "at best": f"{row['faster_overhead_ms']:.1f}",
        }
        for name, policies in ledger.points.items()
        if name.startswith(BYTES)
        for policy, row in policies.items()
    ]
    text = (
        "Bytes that a GPU reads and writes in the replay of one block (bf16 by autocast), counted, not measured; and "
        "the overhead of a step on an H100 by its roofline, as is, and if every operator of a chain took as much less "
        "time as the chain moves fewer bytes:"
    )
    return f"{text}\n\n{markdown_table(rows)}" if rows else "No bytes were counted."


if __name__ == "__main__":
    sys.exit(main())
