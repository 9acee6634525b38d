"""Write tables of README.md and docs/, and reports and plots next to committed records, from the JSON in eval/results.

    python -m adacc_hf.eval.repository.tables
    python -m adacc_hf.eval.repository.tables --check

In a page, a table is between <!-- table: cpu/peers#1 --> and <!-- end of table -->. The comment names folder and file
of the record, and the table's number in the report. Without a number, the whole report is inserted. Nothing between the
comments is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import adacc_hf
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.cli import RUNNERS
from adacc_hf.eval.records.ledger import Ledger

REGION = re.compile(
    r"(<!-- table: (?P<name>[\w./-]+)(#(?P<number>\d+))?( rows: (?P<rows>[^\n]*))? -->\n)"
    r".*?(?P<end><!-- end of table -->)",
    re.DOTALL,
)


class TableError(AdaccError, ValueError):
    """Error of a table without a record, or of a wrong table number."""


def main(argv: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Write the changed files, and draw the plots again. With --check write nothing, and return 1 if a file is out of
    date."""
    parser = argparse.ArgumentParser(prog="adacc_hf.eval.repository.tables", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file is out of date")
    check = parser.parse_args(argv).check
    root = root or checkout()
    stale = {path: text for path, text in texts(root) if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'out of date' if check else 'writing'}: {path}")
        if not check:
            path.write_text(text, encoding="utf-8")
    if not check:
        draw_plots(root / "eval" / "results")
    return 1 if check and stale else 0


def checkout() -> Path:
    """Return the source checkout that this package is imported from. Raise TableError if it is not imported from
    one."""
    root = Path(adacc_hf.__file__).resolve().parents[1]
    if not (root / "README.md").is_file():
        raise TableError(f"{root} has no README.md: run from a source checkout (pip install -e .)")
    return root


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file that is generated from records, with its text."""
    results = root / "eval" / "results"
    for path in sorted(results.rglob("*.json")):
        yield path.with_suffix(".md"), report(path)
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        yield page, with_tables(page.read_text(encoding="utf-8"), results)


def report(path: Path) -> str:
    """Return the report of the record at `path`."""
    ledger = Ledger.load(path)
    return reporter(ledger.run_info["runner"])(ledger)


def reporter(runner: str) -> Callable[[Ledger], str]:
    """Return the function that renders a runner's record as Markdown."""
    if runner == "verify_methods":  # the record of `adacc verify --methods`
        from adacc_hf import verify_methods

        return lambda ledger: verify_methods.report_text(ledger.points)
    module = RUNNERS[runner.replace("_", "-")][0]
    return import_module(f"adacc_hf.eval.{module}").report_text


def draw_plots(results: Path) -> None:
    """Draw the plot next to each record that has one."""
    for path in sorted(results.rglob("*.svg")):
        ledger = Ledger.load(path.with_suffix(".json"))
        module = RUNNERS[ledger.run_info["runner"].replace("_", "-")][0]
        import_module(f"adacc_hf.eval.{module}").save_plot(ledger)


def with_tables(text: str, results: Path) -> str:
    """Return `text` with every region filled from its record. Raise TableError for a region without a record."""

    def fill_region(region: re.Match[str]) -> str:
        path = results / f"{region['name']}.json"
        if not path.is_file():
            raise TableError(
                f"table: {region['name']} names no record: {path} does not exist; measure it, or correct the name"
            )
        text = report(path)
        if region["number"]:
            tables = [part for part in text.split("\n\n") if part.startswith("|")]
            if not 1 <= int(region["number"]) <= len(tables):
                raise TableError(
                    f"table: {region['name']}#{region['number']} must be #1 to #{len(tables)}: correct the number"
                )
            text = tables[int(region["number"]) - 1].rstrip("\n") + "\n"
        if region["rows"]:
            header, rule, *rows = text.splitlines()
            row_of = {row.split("|")[1].strip(): row for row in rows}
            missing = [name for name in region["rows"].split("; ") if name not in row_of]
            if missing:
                raise TableError(f"table: {region['name']} has no row {missing[0]!r}: correct the name")
            text = "\n".join([header, rule, *(row_of[name] for name in region["rows"].split("; "))]) + "\n"
        return f"{region[1]}\n{text}\n{region['end']}"

    return REGION.sub(fill_region, text)


if __name__ == "__main__":
    sys.exit(main())
