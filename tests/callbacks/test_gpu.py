"""The callback in a Trainer on a CUDA device. Run with `pytest -m gpu`."""

import pytest
import torch
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.artifacts.errors import InfeasibleBudgetError

pytestmark = pytest.mark.gpu

TOLERANCE = 0.03
"""Allowed error as a fraction of the predicted peak, as on the CPU. The allocator's rounding is far smaller."""


class _Peaks(TrainerCallback):
    """Callback that records the peak of live bytes in each step."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *args, **kwargs) -> None:
        self.peaks.append(torch.cuda.max_memory_allocated())


@pytest.fixture
def train(make_trainer, make_model):
    """Return `train(callback, **arguments)`, which returns the losses of the steps and their peaks."""

    def run(callback: AdaccCallback | None, **arguments) -> tuple[list[float], list[int]]:
        peaks = _Peaks()
        # Eager attention is used because fused kernels may sum gradients in another order at each call.
        model = make_model(attn_implementation="eager")
        callbacks = [peaks, *([callback] if callback else [])]
        trainer = make_trainer(callbacks, model=model, use_cpu=False, max_steps=6, **arguments)
        trainer.train()
        assert next(model.parameters()).is_cuda
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peaks.peaks

    return run


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bf16": True}, {"fp16": True, "gradient_accumulation_steps": 2}],
    ids=["fp32", "bf16", "fp16-accumulation"],
)
def test_training_is_as_plain_and_keeps_to_the_predicted_peak(train, lossless, arguments):
    plain, _ = train(None, **arguments)
    callback = AdaccCallback(**lossless)
    losses, peaks = train(callback, **arguments)
    # The embedding's gradient may be summed in any order, so that bits differ.
    assert losses == pytest.approx(plain, rel=1e-4)
    assert "recompute" in callback.policy.summary()
    assert max(peaks[-2:]) == pytest.approx(callback.policy.predicted_peak_bytes, rel=TOLERANCE)


def test_a_budget_above_what_fragments_leave_is_told_of_at_once(train, caplog, monkeypatch):
    for module in ("adapt.policy_fit", "torch_glue.memory"):
        monkeypatch.setattr(f"adacc_hf.{module}.has_expandable_segments", lambda: False)
    total = torch.cuda.get_device_properties(0).total_memory
    with caplog.at_level("WARNING"):
        train(AdaccCallback(memory_budget=total // 2))
        assert "fragments" not in caplog.text
        train(AdaccCallback(memory_budget=total))
    assert f"memory_budget={total} is more than the" in caplog.text
    assert "expandable_segments:True" in caplog.text


def test_where_no_policy_fits_beside_fragments_it_is_said_how_to_use_their_room(train, monkeypatch):
    for module in ("adapt.policy_fit", "torch_glue.memory"):
        monkeypatch.setattr(f"adacc_hf.{module}.has_expandable_segments", lambda: False)
    monkeypatch.setattr("adacc_hf.price.measurement.available_bytes", lambda device, static_bytes: 1 << 20)
    with pytest.raises(InfeasibleBudgetError, match=r"smaller batch or shorter sequences\. .*expandable_segments:True"):
        train(AdaccCallback())
