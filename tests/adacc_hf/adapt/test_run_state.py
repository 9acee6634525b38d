"""RunState: the history in memory and in its file."""

from __future__ import annotations

import json

import pytest
from run_builders import events
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, Policy, Profile
from adacc_hf.artifacts.files import HISTORY_FILE, POLICY_FILE, PROFILE_FILE
from adacc_hf.solve.simple_policies import uniform_policy

COMPRESS = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.45}


def test_history_is_kept_in_a_file(make_trainer, tmp_path):
    callback = AdaccCallback(**COMPRESS)
    make_trainer([callback], max_steps=6).train()
    assert json.loads((tmp_path / "run" / HISTORY_FILE).read_text()) == callback.history
    tracking = events(callback, "tracking")
    assert [event["step"] for event in tracking] == [2, 4]
    assert {"num_outliers", "errors", "gradient_error", "compression_rate"} <= tracking[0].keys()
    assert all("step" in event for event in callback.history)


def files_of(folder):
    paths = {Policy: folder / POLICY_FILE, Profile: folder / PROFILE_FILE}
    return tuple(kind.load(path) if path.exists() else None for kind, path in paths.items())


@pytest.mark.parametrize("later", ["solved", "passed in", "passed in by file", "resumed", "failing"])
def test_a_folder_has_the_files_of_its_last_run(make_trainer, lossless, tmp_path, later):
    """An earlier run in the same folder had another budget."""
    folder, saving = tmp_path / "run", {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = AdaccCallback(**lossless)
    make_trainer([first], **saving).train()
    if later == "failing":
        failing = type("Failing", (TrainerCallback,), {"on_step_begin": lambda *args, **kwargs: 1 / 0})()
        with pytest.raises(ZeroDivisionError):
            make_trainer([AdaccCallback(**lossless | {"memory_budget": 0.5}), failing], **saving).train()
        assert files_of(folder) == (None, None)
        assert not (folder / HISTORY_FILE).exists()
        assert files_of(folder / "checkpoint-2") == (first.policy, first.profile)  # checkpoints stay
        return
    if later == "resumed":
        other = {"output_dir": str(tmp_path / "other")}
        make_trainer([AdaccCallback(**lossless | {"memory_budget": 0.9})], **saving, **other).train()
        callback = AdaccCallback(**lossless | {"memory_budget": 0.9})
        make_trainer([callback], **saving).train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-2"))
    elif later == "solved":
        callback = AdaccCallback(**lossless | {"memory_budget": 0.9})
        make_trainer([callback], **saving).train()
    else:
        policy = uniform_policy(first.profile, "recompute")
        callback = AdaccCallback(policy=policy if later == "passed in" else str(folder / POLICY_FILE))
        make_trainer([callback], **saving).train()
    profile = first.profile if later == "passed in by file" else callback.profile
    assert files_of(folder) == (callback.policy, profile)
    assert json.loads((folder / HISTORY_FILE).read_text()) == callback.history
