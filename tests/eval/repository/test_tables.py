"""README's tables, and the tables next to the records, equal those generated from the committed JSON."""

import re
import shutil
from pathlib import Path

import pytest

from adacc_hf.eval.repository.tables import REGION, TableError, main, with_tables

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "eval" / "results"


def test_nothing_is_out_of_date() -> None:
    """If this test fails, run `make tables`."""
    assert main(["--check"], ROOT) == 0


def test_readme_has_no_typed_figures() -> None:
    other_text = REGION.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert REGION.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert re.findall(r"^\|.*\d\.\d.*$", other_text, re.MULTILINE) == []


def test_a_region_may_have_one_table_of_a_report() -> None:
    first, second = (
        with_tables(f"<!-- table: cpu/peers#{number} -->\n<!-- end of table -->", RESULTS) for number in (1, 2)
    )
    assert first.splitlines()[2].startswith("| method ")
    assert second.splitlines()[2].startswith("| other method ")
    assert first.endswith("|\n\n<!-- end of table -->")
    some = with_tables("<!-- table: cpu/peers#1 rows: Adacc at 15%; plain -->\n<!-- end of table -->", RESULTS)
    assert [row.split("  ")[0] for row in some.splitlines()[4:6]] == ["| Adacc at 15%", "| plain"]
    with pytest.raises(TableError, match="cpu/peers has no row 'fast'"):
        with_tables("<!-- table: cpu/peers#1 rows: fast -->\n<!-- end of table -->", RESULTS)
    with pytest.raises(TableError, match="cpu/peers#5 must be #1 to #2"):
        with_tables("<!-- table: cpu/peers#5 -->\n<!-- end of table -->", RESULTS)


def test_a_region_without_a_record_is_refused() -> None:
    with pytest.raises(TableError, match="cpu/nonsense names no record"):
        with_tables("<!-- table: cpu/nonsense -->\n<!-- end of table -->", RESULTS)


def test_what_is_out_of_date_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "eval" / "results" / "cpu"
    folder.mkdir(parents=True)
    shutil.copy(RESULTS / "cpu" / "throughput.json", folder)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: cpu/throughput -->\n<!-- end of table -->\n")
    assert main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out.count("out of date: ") == 2
    assert not (folder / "throughput.md").exists()
    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    assert (folder / "throughput.md").read_text() in readme.read_text()


def test_plots_are_drawn_from_their_records(tmp_path: Path) -> None:
    folder = tmp_path / "eval" / "results" / "cpu"
    folder.mkdir(parents=True)
    (tmp_path / "README.md").write_text("")
    for suffix in (".json", ".svg"):
        shutil.copy(RESULTS / "cpu" / f"loss{suffix}", folder)
    (folder / "loss.svg").write_text("old")
    assert main([], tmp_path) == 0
    assert ">Adacc w/o outlier<" in (folder / "loss.svg").read_text()
