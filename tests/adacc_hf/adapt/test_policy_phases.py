"""Policy changes within a run: other batch sizes, out-of-memory errors, degraded gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from run_builders import SpikeLoss, compress_first, events, failing, run_lengths
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

import adacc_hf.kernels.outlier_int4 as outlier_int4
from adacc_hf import AdaccCallback
from adacc_hf.adapt.policy_phases import AdaptivePhase
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR

COMPRESS = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.45}


def test_out_of_memory_twice_says_what_to_set(make_trainer, lossless, caplog):
    callback = AdaccCallback(**lossless)
    trainer = make_trainer([callback], trainer_class=failing((4, "forward"), (4, "backward")), max_steps=6)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)no room in backward.*set memory_budget=\d+ or less.*failed twice"
    ):
        trainer.train()
    (table,) = [record.getMessage() for record in caplog.records if "when it ran out" in record.getMessage()]
    assert "planned: peak" in table
    assert "gradient of transformer.h.0" in table


def test_half_changed_gradients_are_not_tried_again(make_trainer, lossless):
    class SecondMicroBatch(failing((4, "backward"))):
        def compute_loss(self, model, *args, **kwargs):
            has_gradients = next(model.parameters()).grad is not None
            return (
                super().compute_loss(model, *args, **kwargs)
                if has_gradients
                else Trainer.compute_loss(self, model, *args, **kwargs)
            )

    trainer = make_trainer(
        [AdaccCallback(**lossless)], trainer_class=SecondMicroBatch, max_steps=6, gradient_accumulation_steps=2
    )
    with pytest.raises(
        torch.OutOfMemoryError, match=r"not tried again: .* has changed gradients of earlier micro-batches in place"
    ):
        trainer.train()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradients_that_hooks_have_used_are_not_made_again(make_trainer, lossless, hook):
    """Effects of hooks cannot be undone: DeepSpeed sends gradients to ranks, optimizers in backward move weights."""
    trainer = make_trainer([AdaccCallback(**lossless)], trainer_class=failing((4, "backward")), max_steps=6)
    handle = getattr(next(trainer.model.parameters()), hook)(lambda _: None)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"not tried again: hooks have used gradients of the failed backward"
    ):
        trainer.train()
    handle.remove()


class SpoilCodec(TrainerCallback):
    """Callback that makes decoding return noise from the end of `step` on, and multiplies the loss to make a spike."""

    def __init__(self, monkeypatch, step, noise=30.0):
        self.monkeypatch, self.step, self.noise = monkeypatch, step, noise

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            original = outlier_int4.OutlierInt4.decode
            noise = self.noise

            def decode(codec, payload):
                decoded = original(codec, payload)
                return decoded + noise * torch.randn(decoded.shape).mul_(decoded.abs().mean())

            self.monkeypatch.setattr(outlier_int4.OutlierInt4, "decode", decode)


@pytest.mark.parametrize("degraded", [True, False], ids=["degraded", "healthy"])
def test_a_spike_switches_compression_off_only_where_it_degrades_gradients(make_trainer, monkeypatch, caplog, degraded):
    callback = AdaccCallback(**{**COMPRESS, "memory_budget": 0.9, "actions": ("retain", "compress", "recompute")})
    monkeypatch.setattr("adacc_hf.adapt.policy_fit.solve_policy", compress_first)
    spoilers = [SpoilCodec(monkeypatch, 8)] if degraded else []
    before = {}

    class KeepPolicies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            before[state.global_step] = callback.policy

    trainer = make_trainer([callback, KeepPolicies(), *spoilers], trainer_class=SpikeLoss, max_steps=13)
    trainer.train()
    (guard,) = events(callback, "guard")
    assert guard["step"] == 10, "the step after the spike of step 9 checks the gradients"
    assert "times the median" in guard["reason"]
    codecs = Counter(choice.codec for plan in callback.policy.plans for _, choice in plan.choices)
    assert codecs["channel_int4"], "channel_int4 decodes correctly"
    healthy = Counter(choice.codec for plan in before[8].plans for _, choice in plan.choices)
    named = guard["verdict"].count("(outlier_int4)")
    assert named == healthy["outlier_int4"] - codecs["outlier_int4"]
    assert (named > 0) == degraded
    assert all(event["gradient_error"] <= DEGRADED_ERROR for event in events(callback, "tracking")[-1:])
    assert ("switched off for GPT2Block" in guard["verdict"]) == degraded
    assert any("is switched off for GPT2Block" in message for message in caplog.messages) == degraded


@pytest.mark.parametrize("step", [4, 20], ids=["before-it-has-a-policy", "after"])
def test_a_codec_that_is_switched_off_is_so_at_every_size(make_trainer, make_model, sharpen, monkeypatch, step):
    """Batches of 16 tokens get a policy at their first appearance. Batches of 32 have a degraded gradient."""
    lengths = [31, 32] + ([16, 32] if step == 20 else [32, 32]) * 6 + [16, 32] * 6
    monkeypatch.setattr("adacc_hf.adapt.policy_fit.solve_policy", compress_first)
    policies = {}

    class RecordPolicies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if isinstance(callback.session.phase, AdaptivePhase):
                policies[state.global_step] = callback.session.phase.choice.shown.plans.policy

    settings = {"memory_budget": 0.9, "min_compress_bytes": 1024, "tracking": step + 2}
    callback = AdaccCallback(**{**COMPRESS, **settings})
    model = make_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    run_lengths(make_trainer, lengths, [callback, sharpen(20.0, step), RecordPolicies()], model=model)
    guard, *_ = events(callback, "guard")
    assert "attn.c_attn:addmm" in guard["verdict"]
    for policy in (policy for step, policy in policies.items() if step > guard["step"]):
        codecs = Counter(choice.codec for plan in policy.plans for _, choice in plan.choices)
        assert not codecs["channel_int4"]
        assert codecs["outlier_int4"]


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class CountingTrainer(Trainer):
    """Trainer that counts the operators of each step's forward and backward."""

    def training_step(self, *args, **kwargs):
        with CountOperators() as count:
            loss = super().training_step(*args, **kwargs)
        self.steps = {**getattr(self, "steps", {}), self.state.global_step + 1: count.names}
        return loss


def test_normal_steps_run_the_same_operators_with_and_without_tracking(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("adacc_hf.adapt.policy_fit.solve_policy", compress_first)
    steps = []
    for number, tracking in enumerate(["off", 5]):
        # The memory meter's profiler would count a dispatch mode's operators, too. No step before the 6th is metered.
        callback = AdaccCallback(**COMPRESS, tracking=tracking)
        trainer = make_trainer(
            [callback], trainer_class=CountingTrainer, max_steps=5, output_dir=str(tmp_path / str(number))
        )
        trainer.train()
        steps.append(trainer.steps)
    off, tracked = steps
    assert len(tracked[5]) > len(off[5])
    assert tracked[3] == off[3]
    assert tracked[4] == off[4]
