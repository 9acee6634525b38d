"""The peak of the Trainer's whole steps, including micro-batches, clipping and the optimizer."""

import pytest

from adacc_hf import AdaccCallback

QUIET = {"tracking": "off", "min_compress_bytes": 0}
BATCH_SIZE = 16
BATCH_BYTES = 2 * BATCH_SIZE * 32 * 8
"""Bytes of the token numbers and labels of one micro-batch."""


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4},
    "foreach": {"optim": "adamw_torch", "optim_args": "foreach=True", "gradient_accumulation_steps": 4},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_trainers_step_keeps_to_the_predicted_peak(make_trainer, make_model, measure_step_peak, peak_of, name):
    callback = AdaccCallback(memory_budget=0.5, **QUIET)
    peak_meter = measure_step_peak(7)
    model = make_model(vocab_size=600)
    make_trainer(
        [callback, peak_meter], model=model, per_device_train_batch_size=BATCH_SIZE, max_steps=7, **SETTINGS[name]
    ).train()
    num_micro = SETTINGS[name].get("gradient_accumulation_steps", 1)
    peak = peak_meter.peak_bytes + (num_micro + 1) * BATCH_BYTES  # the loader prefetches one batch
    assert peak == peak_of(callback.policy)
