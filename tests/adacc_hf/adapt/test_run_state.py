"""RunState: the history in memory and in its file."""

from __future__ import annotations

import json

from run_builders import events

import adacc_hf.adapt.run_state as one_run_module
from adacc_hf import AdaccCallback
from adacc_hf.artifacts.files import HISTORY_FILE

COMPRESS = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.45}


def test_history_is_kept_in_a_file(make_trainer, tmp_path):
    callback = AdaccCallback(**COMPRESS)
    make_trainer([callback], max_steps=6).train()
    assert json.loads((tmp_path / "run" / HISTORY_FILE).read_text()) == callback.history
    tracking = events(callback, "tracking")
    assert [event["step"] for event in tracking] == [1, 2, 4]
    assert {"num_outliers", "errors", "gradient_error", "gradient_cosine", "compression_rate"} <= tracking[0].keys()
    assert all("step" in event for event in callback.history)


def test_a_long_history_is_not_written_at_every_event(make_trainer, tmp_path, monkeypatch):
    """The whole history is written each time, so that writing at every event would get ever slower."""
    lengths = []
    original = one_run_module.save_history

    def save(folder, history):
        lengths.append(len(history))
        original(folder, history)

    monkeypatch.setattr(one_run_module, "save_history", save)
    monkeypatch.setattr(one_run_module, "HISTORY_PARTS", 4)
    callback = AdaccCallback(policy=None, **COMPRESS, outliers=False, tracking=1)
    make_trainer([callback], max_steps=32).train()
    assert lengths[-1] == len(callback.history) >= 31
    assert len(lengths) <= 16, "the first four, then each fourth part"
    assert json.loads((tmp_path / "run" / HISTORY_FILE).read_text()) == callback.history
