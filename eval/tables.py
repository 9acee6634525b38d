"""Write the tables of README.md, and those beside committed records, from the JSON in eval/results.

    python -m adacc_hf.eval.tables
    python -m adacc_hf.eval.tables --check

In README.md a table stands between <!-- table: cpu/peers#1 --> and <!-- end of table -->, named by folder and file of
its record and by its number in the report; without a number the whole report stands there. Nothing in it is typed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import adacc_hf
from adacc_hf.errors import AdaccError
from adacc_hf.eval import (
    ablation,
    budget_bench,
    budget_sweep,
    codec_bandwidth,
    codecs,
    demo_table,
    downstream,
    evolution,
    executor_bench,
    gradient_error,
    loss,
    max_batch,
    partitions,
    peak_accuracy,
    peers_report,
    plan_bench,
    solver_bench,
    table1,
    table4,
    throughput,
)
from adacc_hf.eval.ledger import Ledger

REPORTS: dict[str, Callable[[Ledger], str]] = {
    "ablation": ablation.report_text,
    "budget_bench": budget_bench.report_text,
    "budget_sweep": budget_sweep.report_text,
    "cloze": downstream.report_text,
    "codec_bandwidth": codec_bandwidth.report_text,
    "codecs": codecs.report_text,
    "demo_comparison": demo_table.report_text,
    "downstream": downstream.report_text,
    "evolution": evolution.report_text,
    "executor_bench": executor_bench.report_text,
    "gradient_error": gradient_error.report_text,
    "loss": loss.report_text,
    "max_batch": max_batch.report_text,
    "partitions": partitions.report_text,
    "peak_accuracy": peak_accuracy.report_text,
    "peers": peers_report.report_text,
    "plan": plan_bench.report_text,
    "solver": solver_bench.report_text,
    "table1": table1.report_text,
    "table4": table4.report_text,
    "throughput": throughput.report_text,
}
"""By the runner that a record names: what is said of it in Markdown."""

REGION = re.compile(
    r"(<!-- table: (?P<name>[\w./-]+)(#(?P<number>\d+))? -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL
)


class TableError(AdaccError, ValueError):
    """A table has no record, or is not what its record gives."""


def main(argv: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Write what has changed. With --check nothing is written, and 1 is returned if something would be."""
    parser = argparse.ArgumentParser(prog="adacc_hf.eval.tables", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if something is out of date")
    check = parser.parse_args(argv).check
    stale = {path: text for path, text in texts(root or checkout()) if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'out of date' if check else 'writing'}: {path}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


def checkout() -> Path:
    """The source checkout that this package is imported from. Raises TableError outside of one."""
    root = Path(adacc_hf.__file__).resolve().parents[1]
    if not (root / "README.md").is_file():
        raise TableError(f"{root} has no README.md: run from a source checkout (pip install -e .)")
    return root


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file that is made from records, with what should be in it."""
    results = root / "eval" / "results"
    for path in sorted(results.rglob("*.json")):
        yield path.with_suffix(".md"), report(path)
    readme = root / "README.md"
    yield readme, with_tables(readme.read_text(encoding="utf-8"), results)


def report(path: Path) -> str:
    """What is said of the record at `path`."""
    ledger = Ledger.load(path)
    return REPORTS[ledger.run_info["runner"]](ledger)


def with_tables(text: str, results: Path) -> str:
    """`text` with every region filled from its record. Raises TableError for one that has none."""

    def filled(region: re.Match[str]) -> str:
        path = results / f"{region['name']}.json"
        if not path.is_file():
            raise TableError(
                f"table: {region['name']} names no record: {path} does not exist; measure it, or mend the name"
            )
        text = report(path)
        if region["number"]:
            tables = [part for part in text.split("\n\n") if part.startswith("|")]
            if not 1 <= int(region["number"]) <= len(tables):
                raise TableError(
                    f"table: {region['name']}#{region['number']} must be #1 to #{len(tables)}: mend the number"
                )
            text = tables[int(region["number"]) - 1].rstrip("\n") + "\n"
        return f"{region[1]}\n{text}\n{region['end']}"

    return REGION.sub(filled, text)


if __name__ == "__main__":
    sys.exit(main())
