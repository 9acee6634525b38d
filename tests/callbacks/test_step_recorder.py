"""StepRecorder writes what `adacc verify` compares, and ends training after its steps."""

import json

import pytest

from adacc_hf import AdaccCallback
from adacc_hf.callbacks.step_recorder import StepRecorder
from adacc_hf.torch_glue.fingerprints import fingerprint


@pytest.mark.gate
def test_the_first_training_is_recorded_for_some_steps(make_trainer, lossless, tmp_path):
    callbacks = [AdaccCallback(**lossless) for _ in range(2)]
    for adacc in callbacks:
        trainer = make_trainer([adacc, StepRecorder(tmp_path, 2, adacc)], max_steps=5)
        trainer.train()
        assert trainer.state.global_step == 2
        weights = {f"weight {name}": list(fingerprint(p)) for name, p in trainer.model.named_parameters()}
        record = json.loads((tmp_path / "rank-0.json").read_text())
    assert [len(step) for step in record["records"]] == [len(weights) + 1] * 2 + [len(weights)]
    assert all(next(iter(step)) == "loss" for step in record["records"][:2])
    assert record["policy"] == json.loads(json.dumps(callbacks[0].policy.to_json()))
    assert len(record["step_ms"]) == 2
    names = [name.removeprefix("gradient of ") for name in record["records"][0]][1:]
    assert [f"weight {name}" for name in names] == list(record["records"][2])
