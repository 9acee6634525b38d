"""RunProfiler: the bytes of the optimizer's state, and the step that is profiled."""

import logging

import pytest
import torch

import adacc_hf.adapt.run_profiler as profiler_module
from adacc_hf import AdaccConfig
from adacc_hf.adapt.run_profiler import RunProfiler
from adacc_hf.adapt.training_loop import TrainingLoop


class UnpredictableSGD(torch.optim.SGD):
    """Optimizer that can step on the model's own parameters only."""

    def step(self, closure=None):
        raise RuntimeError("who are you?")


@pytest.fixture
def profiler():
    return RunProfiler(AdaccConfig(), TrainingLoop())


@pytest.mark.parametrize(
    ("budget", "level"), [("1GiB", "WARNING"), (2**30, "WARNING"), (0.5, "INFO"), ("auto", "INFO")]
)
def test_first_steps_that_no_profile_predicts_are_warned_of_under_a_budget_in_bytes(budget, level, caplog):
    with caplog.at_level(logging.INFO):
        RunProfiler(AdaccConfig(memory_budget=budget), TrainingLoop()).note_unpredicted("the batch has no images")
    (record,) = caplog.records
    assert record.levelname == level
    assert "the first steps run under torch's checkpoint: the batch has no images" in record.message
    assert ("limits no step" in record.message) == (level == "WARNING")


@pytest.mark.parametrize(("tokens_of_ranks", "has_tiles"), [([4096, 8192], True), ([4096, 4095], False)])
def test_ranks_profile_tiles_together_or_not_at_all(profiler, tokens_of_ranks, has_tiles, monkeypatch):
    """The profile of a sharded model runs on all ranks at once, so that no rank may run more passes than another."""
    configs = []
    monkeypatch.setattr(profiler_module, "profile_batch", lambda *args, **options: configs.append(args[2]))
    monkeypatch.setattr(profiler_module, "gather_from_all_ranks", lambda value: tokens_of_ranks)
    profiler.measure(torch.nn.Linear(2, 2), None, {"input_ids": torch.zeros(1, 4096)}, None)
    assert [config.allows_tiles for config in configs] == [has_tiles]
