"""The accuracy guard over whole runs: huge outliers that break naive quantization, and the bound on activation
errors."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

import adacc_hf.adapt.policy_builder as maker_module
import adacc_hf.adapt.policy_selection as selection_module
from adacc_hf import AdaccCallback
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.policy import RECOMPUTE
from adacc_hf.callbacks.paper_methods import method_callbacks
from adacc_hf.solve.simple_policies import policy_of_plans, uniform_policy

NUM_TOKENS = 97
HUGE = 1.0
"""Size of the outliers in two channels of every LayerNorm's input. The other channels carry embeddings of 0.02."""

SETTINGS = {"logging_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 8}


class Chain(torch.utils.data.Dataset):
    """Sequences in which each token has two equally likely successors, so that the loss falls to ln 2 at best."""

    def __init__(self, num_sequences=4096, length=32):
        generator = torch.Generator().manual_seed(0)
        followers = torch.randint(0, NUM_TOKENS, (NUM_TOKENS, 2), generator=generator)
        tokens = [torch.randint(0, NUM_TOKENS, (num_sequences,), generator=generator)]
        while len(tokens) < length:
            choice = torch.randint(0, 2, (num_sequences,), generator=generator)
            tokens.append(followers[tokens[-1], choice])
        self.ids = torch.stack(tokens, 1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@pytest.fixture
def train_with_huge_outliers(make_trainer, make_model):
    """Return `train_with_huge_outliers(callbacks, max_steps, resume=None)`, which returns the Trainer after training.

    The Trainer logs every 20 steps and saves a checkpoint every 80. `resume` is the checkpoint to resume from.
    """

    def run(callbacks, max_steps, resume=None):
        model = make_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        positions = model.transformer.wpe.weight.requires_grad_(False)
        positions[:, [5, 40]] = torch.tensor([HUGE, -HUGE])
        settings = SETTINGS | {"max_steps": max_steps, "logging_nan_inf_filter": False, "save_steps": 80}
        trainer = make_trainer(callbacks, model=model, save_strategy="steps", **settings)
        trainer.train_dataset = Chain()
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def losses_of(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_training_that_naive_quantization_breaks_goes_on_as_plain(train_with_huge_outliers, monkeypatch):
    for module in (maker_module, selection_module):  # all activations are compressed, so that only the guard can help
        monkeypatch.setattr(module, "solve_policy", lambda profile, *_: uniform_policy(profile, "compress"))
    plain = losses_of(train_with_huge_outliers([], 400))
    callbacks, _ = method_callbacks("quantization", "1.0")
    naive = losses_of(train_with_huge_outliers([*callbacks], 400))
    # Rounding differs between instruction sets: with AVX2 and AVX-512, the ratio was 4.2 and 5.3. Without vector
    # instructions, the naive loss was NaN, which passes too.
    assert not naive[-1] <= 1.5 * plain[-1]
    assert math.isfinite(naive[0])
    guarded = AdaccCallback(min_compress_bytes=1024, memory_budget=1.0)
    adacc = train_with_huge_outliers([guarded], 960)
    switches = [event for event in guarded.history if event["event"] == "guard"]
    assert switches
    assert all("switched off for GPT2Block" in event["verdict"] for event in switches)
    assert lossy_codecs(guarded), "activations that degrade no gradient stay compressed"
    # Plain training from the last switch on ended between 0.690 and 0.786 with nine seeds, because the degraded steps
    # before set a course that reaches ln 2, 0.693, sooner or later.
    assert statistics.fmean(losses_of(adacc)[-5:]) < 0.85
    # Relative to plain training, compression ended 7 % below to 5 % above by chance, and within 0.4 % if both fell
    # early.
    checkpoint_step = next(step for step in range(80, 960, 80) if step > switches[-1]["step"])
    checkpoint = f"{adacc.args.output_dir}/checkpoint-{checkpoint_step}"
    resumed = losses_of(train_with_huge_outliers([], 960, resume=checkpoint))
    assert statistics.fmean(losses_of(adacc)[-5:]) < 1.1 * statistics.fmean(resumed[-5:])


def lossy_codecs(callback):
    """Return the activations that the run's last policy compresses with loss, with the codec of each."""
    kind = callback.profile.kinds[0]
    lossless = {option.codec for value in kind.values for option in value.codecs if option.lossless}
    choices = [item for plan in callback.policy.plans for item in plan.choices]
    lossy = [(v, choice.codec) for v, choice in choices if choice.codec not in (None, *lossless)]
    return {f"GPT2Block.{kind.names[v]}": codec for v, codec in lossy}


def compress_all_but_softmax(profile, *_):
    """Compress everything but attention's softmax, which is recomputed from queries and keys."""
    softmax = {value.index for value in profile.kinds[0].values if value.role == "softmax"}
    plans = [
        replace(plan, choices=tuple((v, RECOMPUTE if v in softmax else choice) for v, choice in plan.choices))
        for plan in uniform_policy(profile, "compress").plans * len(profile.blocks)
    ]
    return policy_of_plans(profile, plans)


@pytest.mark.parametrize(
    ("attention", "factor", "culprits"),
    [("sdpa", 20.0, ["attn.c_attn:addmm"]), ("eager", 30.0, ["attn:clone", "attn:clone#2"])],
    ids=["sdpa", "eager"],
)
def test_sharp_attention_ends_the_codecs_of_queries_and_keys_alone(
    make_trainer, make_model, sharpen, monkeypatch, attention, factor, culprits
):
    """The backward of fused attention recomputes the softmax. The profile was taken before attention became sharp, and
    could not show this error."""
    for module in (maker_module, selection_module):  # replaces the solver, whose choice depends on measured times
        monkeypatch.setattr(module, "solve_policy", compress_all_but_softmax)
    callback_before = AdaccCallback(min_compress_bytes=1024, memory_budget=1.0)
    sharp_callback = AdaccCallback(min_compress_bytes=1024, memory_budget=1.0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    for callbacks in ([callback_before], [sharp_callback, sharpen(factor)]):
        model = make_model(attn_implementation=attention, **dropout)
        make_trainer(callbacks, model=model, max_steps=12).train()
    (guard,) = [event for event in sharp_callback.history if event["event"] == "guard"]
    gradient_errors = {
        event["step"]: event["gradient_error"] for event in sharp_callback.history if event["event"] == "tracking"
    }
    assert guard["step"] == 8
    assert list(gradient_errors) == [1, 2, 4, 8, 10, 11], (
        "the step after the switch finds no further error, and tracking starts over"
    )
    assert [step for step, error in gradient_errors.items() if error > DEGRADED_ERROR] == [8]
    codecs_before, codecs_after = lossy_codecs(callback_before), lossy_codecs(sharp_callback)
    finer_codecs = sorted(name for name in codecs_before if codecs_after[name] != codecs_before[name])
    assert [name.partition("GPT2Block.")[2] for name in finer_codecs] == culprits
    assert {(codecs_before[name], codecs_after[name]) for name in finer_codecs} == {("channel_int4", "int8")}
    assert all(f"{name} (channel_int4)" in guard["verdict"] for name in finer_codecs)


def recompute_what_is_not_compressed(profile, *_):
    """Compress everything, and recompute queries, keys and values where they must not be compressed."""
    kind = profile.kinds[0]
    recomputed = {value.index for value in kind.values if value.role == "qkv" and not value.codecs}
    plans = [
        replace(plan, choices=tuple((v, RECOMPUTE if v in recomputed else choice) for v, choice in plan.choices))
        for plan in uniform_policy(profile, "compress").plans * len(profile.blocks)
    ]
    return policy_of_plans(profile, plans)


def test_what_is_recomputed_from_what_is_compressed_is_found_in_the_step_after_the_switch(
    make_trainer, make_model, sharpen, monkeypatch, tmp_path
):
    """The step after the switch finds the error, also if the run is resumed in between. The next tracking step would be
    the 13th. No finer codec replaces a codec that the guard names."""
    for module in (maker_module, selection_module):
        monkeypatch.setattr(module, "solve_policy", recompute_what_is_not_compressed)
    recorded_events = []
    for checkpoint in (None, "checkpoint-8", "checkpoint-9"):
        settings = {"memory_budget": 1.0, "tracking": 4, "codecs": ("channel_int4",)}
        callback = AdaccCallback(min_compress_bytes=1024, **settings)
        model = make_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        trainer = make_trainer(
            [callback, sharpen(20.0)], model=model, max_steps=12, save_strategy="steps", save_steps=1
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / "run" / checkpoint))
        recorded_events.append([event for event in callback.history if event["event"] in ("guard", "change")])
    (degraded, switched, again, switched_again), *resumed = recorded_events
    assert [event["step"] for event in recorded_events[0]] == [8, 9, 10, 11]
    assert "switched off for GPT2Block.attn.c_attn:addmm (channel_int4)" in degraded["verdict"]
    assert "GPT2Block.ln_1:native_layer_norm (channel_int4)" in again["verdict"]
    assert switched["reason"].startswith("the codec is no longer allowed for GPT2Block.attn.c_attn:addmm")
    assert switched_again["reason"] == "the codec is no longer allowed for GPT2Block.ln_1:native_layer_norm"
    for events in resumed:
        assert [(event["step"], event["event"]) for event in events] == [
            (e["step"], e["event"]) for e in recorded_events[0]
        ]
        assert [event.get("verdict") for event in events] == [event.get("verdict") for event in recorded_events[0]]


def test_errors_above_the_bound_are_not_seen_again(make_trainer, monkeypatch):
    """The first policy compresses everything, like one of a profile that showed no error. Tracking finds the true
    errors."""
    monkeypatch.setattr(maker_module, "solve_policy", lambda profile, *_: uniform_policy(profile, "compress"))
    bound = 0.1
    settings = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.5}
    callback = AdaccCallback(**settings, max_error=bound)
    make_trainer([callback], max_steps=20).train()
    first, second, *later = [event for event in callback.history if event["event"] == "tracking"]
    assert max(first["errors"].values()) > bound
    (change, *_) = [event for event in callback.history if event["event"] == "change"]
    assert change["reason"].startswith("the codec is no longer allowed for ")
    assert change["step"] == second["step"], "the first tracking step's change is applied after the second"
    assert [event["step"] for event in later] == [4, 8, 16]
    assert all(max(event["errors"].values(), default=0.0) <= bound for event in later)
