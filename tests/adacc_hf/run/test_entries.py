"""Entries of a block's calls: the sizes that they keep, and forget."""

from dataclasses import replace

import pytest
import torch
from function_builders import tanh_of

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.policy import RETAIN
from adacc_hf.run import entries as entries_module
from adacc_hf.solve.simple_policies import policy_of_plans, uniform_policy
from adacc_hf.tape import symbolic_tape

CONFIG = AdaccConfig(min_compress_bytes=0)


def rounds_up(block, hidden):
    """Work on a multiple of four tokens, so that no polynomial describes the block's sizes."""
    tokens = hidden.shape[1]
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, -tokens % 4))
    return hidden + block.down(block.up(padded).tanh())[:, :tokens]


def text_of(tokens, samples=2):
    return {"x": torch.randn(samples, tokens, 8, generator=torch.Generator().manual_seed(tokens))}


def remember_few(monkeypatch, most):
    monkeypatch.setattr(entries_module, "MAX_SHAPES", most)
    monkeypatch.setattr(symbolic_tape, "MOST_SIZES", most)
    monkeypatch.setattr(entries_module, "MOST_SIZES", most)
    monkeypatch.setattr(symbolic_tape, "MOST_RECORDS", 3)


def test_forgotten_shapes_leave_nothing(toy_model, run_steps, assert_same_steps, monkeypatch):
    """Blocks without a symbolic tape keep tapes and plans of the most recent shapes only."""
    remember_few(monkeypatch, most=3)
    model = toy_model(rounds_up)
    policy = uniform_policy(profile_model(model, text_of(10), CONFIG), "recompute")
    batches = [text_of(tokens) for tokens in (5, 6, 7, 8, 9)]
    plain = [run_steps(model, each, num_steps=1) for each in batches]
    with apply_policy(model, policy) as handle:
        for each, expected in [*zip(batches, plain, strict=True)] * 2:
            assert_same_steps(run_steps(model, each, num_steps=1), expected)
        for call in handle.installation.calls.values():
            assert len(call.strategy.entries.recorded) == len(call.strategy.known_shapes) == 3
            assert not call.strategy.entries.sized
        assert len(handle.tape_cache.execution_plans) == 3
        assert len(handle.tape_cache.tapes) == 3 + len(handle.tape_cache.profiled)


def test_the_least_recently_used_shape_is_forgotten(gpt2, token_batch, recomputing, run_steps, monkeypatch):
    monkeypatch.setattr(entries_module, "MAX_SHAPES", 2)
    with apply_policy(gpt2, recomputing) as handle:
        for tokens in (5, 6, 5, 7):
            run_steps(gpt2, token_batch(2, tokens), num_steps=1)
        strategy = handle.installation.calls["transformer.h.0"].strategy
        tapes = strategy.known_shapes.values()
        sizes = [next(v for v in t.values if t.is_block_input(v.index)).ref.geometry[0] for t in tapes]
    assert sizes == [(2, 5, 32), (2, 7, 32)]


@pytest.mark.parametrize(("change", "is_followed"), [("sine", True), ("autocast", False)])
def test_other_operators_follow_the_plan_in_the_same_precision(toy_model, run_steps, change, is_followed):
    """A planned choice may store more bytes of another dtype. Then a call stores as under full recomputation."""

    def forward(block, hidden):
        with torch.autocast("cpu", torch.bfloat16, enabled=block.change == "autocast"):
            hidden = block.up(hidden).tanh().exp()
            return block.down(hidden.sin() if block.change == "sine" else hidden).float()

    model, choices = toy_model(forward, setup=lambda block: setattr(block, "change", None)), []
    profile = profile_model(model, text_of(10), CONFIG)
    least, tanh = uniform_policy(profile, "recompute"), tanh_of(profile).index
    retaining = tuple((v, RETAIN if v == tanh else choice) for v, choice in least.plans[0].choices)
    plans = [replace(plan, choices=retaining) for plan in least.plans * len(profile.blocks)]
    for policy in (policy_of_plans(profile, plans), least):
        with apply_policy(model, policy) as handle:
            for layer in model.layers:
                layer.change = change
            run_steps(model, text_of(10), num_steps=1)
            entries = handle.installation.calls["layers.0"].strategy.entries
            choices += [entries.choices(entry.tape) for entry in entries.recorded.values()]
    assert len(choices) == 2
    assert (choices[0] != choices[1]) == is_followed
