import json
from pathlib import Path

import demo_comparison
import gpt2_pile
import pytest

from adacc_hf import Policy


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
