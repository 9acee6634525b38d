import json
from pathlib import Path

import demo_comparison
import gpt2_pile
import pytest
from recipe_arguments import parse_arguments

from adacc_hf import Policy
from adacc_hf.eval.records.schemas import check_record
from adacc_hf.reports.run_record import Spread


@pytest.fixture
def figures(tiny_run: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the figures of a whole comparison of the tiny model."""
    monkeypatch.setattr(demo_comparison, "TIMED_ROUNDS", 3)
    return gpt2_pile.main([*tiny_run, "--method", "compare", "--report", "false"])


def test_the_comparison_trains_and_measures_every_method(figures: dict[str, float], tmp_path: Path):
    folders = [contender.folder for contender in demo_comparison.CONTENDERS]
    stored_bytes = {folder: figures[f"{folder}/activation_bytes"] for folder in folders}
    assert stored_bytes["adacc-50"] <= 0.5 * stored_bytes["plain"]
    assert stored_bytes["adacc-25"] <= 0.25 * stored_bytes["plain"]
    assert max(stored_bytes["checkpointing"], stored_bytes["quantization"]) < stored_bytes["plain"]
    # The runs share seed and data, and recomputing changes no bit.
    assert figures["checkpointing/validation_loss"] == figures["plain/validation_loss"]
    for folder in folders:
        assert figures[f"{folder}/peak_bytes"] > stored_bytes[folder]
        # AdamW keeps two numbers per parameter, so that its state takes more than the gradients that it reads.
        assert figures[f"{folder}/step_peak_bytes"] > figures[f"{folder}/peak_bytes"]
        assert figures[f"{folder}/relative_throughput"] > 0
        assert (tmp_path / "run" / folder / "model.safetensors").is_file()

    # The same definition as the policy's prediction. The Trainer's step also has the next batch and its metrics.
    policy = Policy.load(tmp_path / "run" / "adacc-50" / "adacc_policy.json")
    assert figures["adacc-50/step_peak_bytes"] == pytest.approx(policy.predicted_peak_bytes, rel=0.02)

    record = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert list(record["train_info"]["points"]) == folders
    assert record["train_info"]["points"]["plain"]["relative_throughput"] == {"low": 1.0, "median": 1.0, "high": 1.0}


ROWS = [
    demo_comparison.ComparisonRow(
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


def test_the_table_and_the_record_hold_figures_settings_and_versions(tmp_path: Path):
    table = demo_comparison.save_comparison(ROWS, tmp_path / "run", parse_arguments(["--seed", "5", "--use_cpu"]))
    line = table.splitlines()[3]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "a much longer title",
        "512.00 KiB",
        "3.00 MiB",
        "5.00 MiB",
        "0.75 (0.90 to 1.10)",
        "4.0000",
        "4.2500",
    ]
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
    assert text.startswith(table)
    assert "seed 5" in text
