"""The peak of the Trainer's whole steps: micro-batches, clipping and the optimizer."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.memory import CpuMemoryMeter, count_static_bytes


class MeasureStep(TrainerCallback):
    """Counts the live bytes of one step, from its first micro-batch to the end of the optimizer's step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.peak_bytes = 0

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.static_bytes = count_static_bytes(model, {}, optimizer)
            self.meter = CpuMemoryMeter()
            self.meter.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.meter.__exit__(None, None, None)
            self.peak_bytes = self.static_bytes + self.meter.peak_bytes


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4},
    "foreach": {"optim": "adamw_torch", "optim_args": "foreach=True", "gradient_accumulation_steps": 4},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_trainers_step_keeps_to_the_predicted_peak(make_trainer, make_model, name):
    callback = AdaccCallback(memory_budget=0.5, tracking="off", guard=False, min_compress_bytes=0)
    measured = MeasureStep(step=5)
    model = make_model(vocab_size=600)
    make_trainer([callback, measured], model=model, per_device_train_batch_size=16, **SETTINGS[name]).train()
    num_micro = SETTINGS[name].get("gradient_accumulation_steps", 1)
    ids_and_labels = 2 * 16 * 32 * 8
    peak = measured.peak_bytes + num_micro * ids_and_labels
    # Of about 8 MB: scalars that the Trainer keeps, a random state, and autocast's cache as in test_memory.py.
    assert peak == pytest.approx(callback.policy.predicted_peak_bytes, rel=0.03)
