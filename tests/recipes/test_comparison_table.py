import json
from pathlib import Path

from comparison_table import ComparisonRow, save_comparison, table_text
from recipe_arguments import parse_arguments

from adacc_hf.eval.records.schemas import check_record
from adacc_hf.reports.run_record import Spread

ROWS = [
    ComparisonRow(
        title=title,
        folder=title,
        activation_bytes=activation_bytes,
        peak_bytes=3 * 2**20,
        step_peak_bytes=5 * 2**20,
        relative_throughput=Spread(low=0.9, median=median, high=1.1),
        final_train_loss=4.0,
        validation_loss=4.25,
    )
    for title, activation_bytes, median in (("plain", 2**20, 1.0), ("a much longer title", 2**19, 0.75))
]


def test_the_table_is_aligned_and_complete():
    lines = table_text(ROWS).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "a much longer title",
        "512.00 KiB",
        "3.00 MiB",
        "5.00 MiB",
        "0.75 (0.90 to 1.10)",
        "4.0000",
        "4.2500",
    ]


def test_the_record_holds_figures_settings_and_versions(tmp_path: Path):
    save_comparison(ROWS, tmp_path / "run", parse_arguments(["--seed", "5", "--use_cpu"]))
    record = json.loads((tmp_path / "run" / "comparison.json").read_text())
    check_record(record)
    assert record["train_info"]["points"]["a much longer title"]["relative_throughput"] == {
        "low": 0.9,
        "median": 0.75,
        "high": 1.1,
    }
    assert record["run_info"]["training"]["seed"] == 5
    assert record["run_info"]["model"]["model"] == "demo"
    assert {"torch", "transformers", "adacc_hf"} <= record["meta_info"]["versions"].keys()
    text = (tmp_path / "run" / "comparison.md").read_text()
    assert text.startswith(table_text(ROWS))
    assert "seed 5" in text
