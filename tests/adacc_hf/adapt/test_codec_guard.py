"""The accuracy guard over whole runs: codecs that degrade gradients, and the bound on activation errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import adacc_hf.adapt.policy_fit as fit_module
from adacc_hf import AdaccCallback, AdaccSession
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.policy import RECOMPUTE
from adacc_hf.solve.simple_policies import policy_of_plans, uniform_policy

FUNCTIONS = (torch.square, torch.tanh)
"""Functions of the two blocks. The error of INT4 degrades the gradient of the first one only."""


def test_codecs_that_degrade_gradients_are_switched_off_and_healthy_ones_stay(toy_model, toy_batch, monkeypatch):
    """The gradient of a square is proportional to its input. Here one of the input's eight channels becomes huge, and
    gets no gradient. INT4 decodes all other channels to 0, so the error of the gradient is 1. The error of the
    input itself is below 1 %, and the huge channel is no outlier: a Z-score of eight channels is at most sqrt(7), and
    the threshold is 3. The learning rate is 0, so rounding does not accumulate."""
    # All activations are compressed, so that only the guard can help.
    monkeypatch.setattr(fit_module, "solve_policy", lambda profile, *_: uniform_policy(profile, "compress"))
    model, plain = models = [toy_model(lambda block, x: block.down(block.function(block.up(x)))) for _ in range(2)]
    for block, function in zip([*model.layers, *plain.layers], FUNCTIONS * 2, strict=True):
        block.function = function
        block.down.requires_grad_(False)
    batch, optimizer = toy_batch(64), torch.optim.SGD(model.parameters(), lr=0.0)
    errors = []
    with AdaccSession(model, optimizer, memory_budget=1.0, min_compress_bytes=0, head="plain") as session:
        for step in range(1, 13):
            if step == 3:
                for block in (model.layers[0], plain.layers[0]):
                    block.up.bias.data[0], block.down.weight.data[:, 0] = 1e4, 0.0
            with session.step(batch):
                model.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
            plain.zero_grad()
            plain(**batch).loss.backward()
            ours, exact = (model.layers[0].up.weight.grad for model in models)
            errors.append(float((ours - exact).norm() / exact.norm()))
    verdicts = {event["verdict"]: event["step"] for event in reversed(session.history) if event["event"] == "guard"}
    prefix = "lossy compression is switched off for ToyBlock.up:addmm"
    assert verdicts == {f"{prefix} (outlier_int4)": 8}
    assert errors[2:8] == pytest.approx([1.0] * 6)
    assert max(errors[:2] + errors[8:]) < DEGRADED_ERROR
    codecs = [[choice.codec for _, choice in plan.choices] for plan in session.policy.plans]
    assert codecs == [["int8", None], ["int8", "outlier_int4"]]


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
    monkeypatch.setattr(fit_module, "solve_policy", compress_all_but_softmax)
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
    assert list(gradient_errors) == [2, 4, 8, 9, 10, 12], (
        "the step after the switch finds no further error, and tracking starts over"
    )
    assert [step for step, error in gradient_errors.items() if error > DEGRADED_ERROR] == [8]
    codecs_before, codecs_after = lossy_codecs(callback_before), lossy_codecs(sharp_callback)
    ended = sorted(name for name in codecs_before if name not in codecs_after)
    assert set(culprits) <= {name.partition("GPT2Block.")[2] for name in ended}
    assert len(ended) <= 2, "of queries, keys and what attention makes of them"
    assert all(f"{name} ({codecs_before[name]})" in guard["verdict"] for name in ended)


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
    make_trainer, make_model, sharpen, monkeypatch
):
    """The step after the switch finds the error. The next tracking step would be the 13th."""
    monkeypatch.setattr(fit_module, "solve_policy", recompute_what_is_not_compressed)
    callback = AdaccCallback(min_compress_bytes=1024, memory_budget=1.0, tracking=4, codecs=("channel_int4",))
    model = make_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    make_trainer([callback, sharpen(20.0)], model=model, max_steps=12).train()
    found = [event for event in callback.history if event["event"] in ("guard", "change")]
    degraded, switched, again, switched_again = found
    assert [event["step"] for event in found] == [8, 8, 9, 9]
    assert "switched off for GPT2Block.attn.c_attn:addmm (channel_int4)" in degraded["verdict"]
    assert "GPT2Block.ln_1:native_layer_norm (channel_int4)" in again["verdict"]
    assert "the codec is no longer allowed for GPT2Block.attn.c_attn:addmm" in switched["reason"]
    assert "the codec is no longer allowed for GPT2Block.ln_1:native_layer_norm" in switched_again["reason"]


def test_errors_above_the_bound_are_not_seen_again(make_trainer, monkeypatch):
    """The first policy compresses everything, as if a profile showed no error. Tracking finds the true errors."""
    solvers = iter([lambda profile, *_: uniform_policy(profile, "compress")])
    solve = fit_module.solve_policy
    monkeypatch.setattr(fit_module, "solve_policy", lambda *args: next(solvers, solve)(*args))
    bound = 0.1
    settings = {"actions": ("retain", "compress"), "min_compress_bytes": 4096, "memory_budget": 0.5}
    callback = AdaccCallback(**settings, max_error=bound)
    make_trainer([callback], max_steps=20).train()
    first, *later = [event for event in callback.history if event["event"] == "tracking"]
    assert max(first["errors"].values()) > bound
    (change, *_) = [event for event in callback.history if event["event"] == "change"]
    assert "the codec is no longer allowed for " in change["reason"]
    assert change["step"] == first["step"]
    assert [event["step"] for event in later] == [4, 8, 16]
    assert all(max(event["errors"].values(), default=0.0) <= bound for event in later)
