"""RunProfiler: the bytes of the optimizer's state, and the step that is profiled."""

import logging

import pytest
import torch

from adacc_hf import AdaccConfig
from adacc_hf.adapt.full_recompute import MOST_STEPS, FullRecompute, is_ready
from adacc_hf.adapt.run_profiler import RunProfiler
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.artifacts.errors import UncalledBlocksError


class UnpredictableSGD(torch.optim.SGD):
    """Optimizer that can step on the model's own parameters only."""

    def step(self, closure=None):
        raise RuntimeError("who are you?")


@pytest.fixture
def profiler():
    return RunProfiler(AdaccConfig(), TrainingLoop())


def test_a_state_that_nobody_foresees_ends_no_run(profiler, caplog):
    """The optimizer has no state yet, as after first steps that fp16 skipped."""
    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING):
        assert profiler._state_bytes(model, UnpredictableSGD(model.parameters())) == 0
    (record,) = caplog.records
    assert "optimizer=UnpredictableSGD(...) has not created all of its state" in record.message
    assert "who are you?" in record.message
    assert "until the memory of a step is measured" in record.message


def test_a_state_that_is_foreseen_is_left_to_the_profile(profiler, caplog):
    model = torch.nn.Linear(2, 2)
    assert profiler._state_bytes(model, torch.optim.AdamW(model.parameters())) is None
    assert profiler._state_bytes(model, None) == 0
    profiler.inner_steps.has_detected = True
    assert profiler._state_bytes(model, UnpredictableSGD(model.parameters())) == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("budget", "level"), [("1GiB", "WARNING"), (2**30, "WARNING"), (0.5, "INFO"), ("auto", "INFO")]
)
def test_first_steps_that_no_profile_predicts_are_warned_of_under_a_budget_in_bytes(budget, level, caplog):
    with caplog.at_level(logging.INFO):
        RunProfiler(AdaccConfig(memory_budget=budget), TrainingLoop()).note_unpredicted("the batch has no images")
    (record,) = caplog.records
    assert record.levelname == level
    assert "the first steps run under torch's checkpoint: the batch has no images" in record.message
    assert ("bounds no step" in record.message) == (level == "WARNING")


def test_a_profile_waits_for_a_batch_that_trains_every_block(make_model):
    """Waiting ends at MOST_STEPS with an error that says what to set."""
    model, tokens = make_model(), torch.arange(8)[None]
    waiting = FullRecompute(model, AdaccConfig())
    blocks = model.transformer.h
    model.transformer.h = blocks[:1]
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert not is_ready(waiting, MOST_STEPS - 1)
    with pytest.raises(UncalledBlocksError, match=f"not called by the last of {MOST_STEPS} steps"):
        is_ready(waiting, MOST_STEPS)
    model.transformer.h = blocks
    waiting.begin_step()
    model(tokens, labels=tokens).loss.backward()
    assert is_ready(waiting, 0)
    waiting.remove()
