"""The accuracy guard over whole runs: codecs that degrade gradients, and the bound on activation errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import adacc_hf.adapt.policy_fit as fit_module
from adacc_hf import AdaccCallback, AdaccSession
from adacc_hf.adapt.corrections import SWITCHED_OFF
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
    assert switched["reason"] == switched_again["reason"] == SWITCHED_OFF


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
    assert change["reason"] == "outlier channels or errors changed"
    assert change["step"] == first["step"]
    assert [event["step"] for event in later] == [4, 8, 16]
    assert all(max(event["errors"].values(), default=0.0) <= bound for event in later)
