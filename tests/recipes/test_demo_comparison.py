import json
from pathlib import Path

import demo_comparison
import pytest
from recipe_runs import with_setting

from adacc_hf import Policy
from adacc_hf.eval.records.schemas import check_record


def test_the_comparison_trains_and_measures_every_method(tiny_run: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(demo_comparison, "TIMED_ROUNDS", 3)
    rows = demo_comparison.main([*tiny_run, "--report", "false"])
    stored_bytes = {folder: row.activation_bytes for folder, row in rows.items()}
    assert stored_bytes["adacc-50"] <= 0.5 * stored_bytes["plain"]
    assert stored_bytes["adacc-25"] <= 0.25 * stored_bytes["plain"]
    assert max(stored_bytes["checkpointing"], stored_bytes["quantization"]) < stored_bytes["plain"]
    # The runs share seed and data, and recomputing changes no bit.
    assert rows["checkpointing"].validation_loss == rows["plain"].validation_loss
    for folder, row in rows.items():
        assert row.step_peak_bytes > row.activation_bytes
        assert (tmp_path / "run" / folder / "model.safetensors").is_file()

    # The same definition as the policy's prediction. The Trainer's step also has the next batch and its metrics.
    policy = Policy.load(tmp_path / "run" / "adacc-50" / "adacc_policy.json")
    assert rows["adacc-50"].step_peak_bytes == pytest.approx(policy.predicted_peak_bytes, rel=0.02)

    record = json.loads((tmp_path / "run" / "comparison.json").read_text())
    check_record(record)
    assert list(record["train_info"]["points"]) == list(demo_comparison.CONTENDERS)
    assert record["train_info"]["points"]["plain"]["relative_throughput"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert record["run_info"]["recipe"]["method"] == "adacc"
    text = (tmp_path / "run" / "comparison.md").read_text()
    assert text.startswith("| method ")
    assert "Adacc at 25 % of plain" in text
    assert "seed 42" in text


def test_a_comparison_starts_every_method_anew(tiny_run: list[str], tmp_path: Path):
    with pytest.raises(ValueError, match="drop --resume_from_checkpoint"):
        demo_comparison.main(with_setting(tiny_run, resume_from_checkpoint=tmp_path))
