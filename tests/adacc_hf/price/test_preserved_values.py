"""Profiling by hand restores buffers, gradients and random generators, and no Python state."""

import collections
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import UnrestorableError
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0, actions=("retain", "recompute"))
SEEN = []


def plain_block(block, hidden):
    return hidden + block.down(block.up(hidden).tanh())


def test_python_state_changes_as_in_a_step_of_training(toy_model, toy_batch):
    model, seen = toy_model(plain_block), []
    model.count, forward = 0, model.forward

    def counting_forward(x):
        model.count += 1
        seen.append(torch.is_grad_enabled())
        return forward(x)

    model.forward = counting_forward
    profile_model(model, toy_batch(), CONFIG)
    assert (model.count, seen) == (1, [True])


@pytest.mark.parametrize("has_gradient", [False, True])
def test_gradients_outside_the_model_and_flags_are_as_before(toy_model, toy_batch, has_gradient):
    model, teacher, called = toy_model(plain_block), nn.Linear(8, 8), []
    model.inlet.weight.requires_grad_(False)
    for leaf in (teacher.weight, model.head.weight):
        leaf.grad = torch.full_like(leaf, 5.0) if has_gradient else None
        leaf.register_post_accumulate_grad_hook(called.append)
    gradients = [leaf.grad for leaf in (teacher.weight, model.head.weight)]

    def compute_loss(model, batch):
        model.inlet.weight.requires_grad_(True)
        output = model(**batch)
        return output.loss + teacher(output.hidden).square().mean()

    profile_model(model, toy_batch(), CONFIG, compute_loss=compute_loss)
    assert all(leaf.grad is grad for leaf, grad in zip((teacher.weight, model.head.weight), gradients, strict=True))
    assert not model.inlet.weight.requires_grad
    assert not called


def test_a_table_that_blocks_fill_is_recorded_filled(toy_model, toy_batch, run_steps, assert_same_steps):
    """The first forward makes the table, so that a second one is recorded."""

    def with_table(block, hidden):
        if block.table is None:
            block.table = torch.arange(8.0).cos().sin()
        return plain_block(block, hidden * block.table)

    def set_up(block):
        block.table = None

    batch = toy_batch()
    plain = run_steps(toy_model(with_table, setup=set_up), batch)
    model = toy_model(with_table, setup=set_up)
    profile = profile_model(model, batch, CONFIG)
    assert not [operator for operator in profile.kinds[0].operators if "cos" in operator.name]
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG) as handle:
        assert_same_steps(run_steps(model, batch), plain)
        assert not handle.tape_cache.fallbacks


# Arguments that blocks add to.


def adds_loss(block, hidden, sink):
    x = block.up(hidden).tanh()
    gather = getattr(sink, "losses", sink)
    if isinstance(gather, dict):
        gather.setdefault("aux", []).append(x.square().mean())
    else:
        gather.append(x.square().mean())
    return hidden + block.down(x)


def adds_loss_and_reads(block, hidden, sink):
    """Add to a list and read data, so that torch's checkpoint runs the block."""
    return adds_loss(block, hidden, sink) * (1.0 if hidden.sum().item() > 0 else 0.5)


SINKS = {
    "list": list,
    "dict": dict,
    "deque": collections.deque,
    "namespace": lambda: SimpleNamespace(losses=[]),
    "list of a global": lambda: SEEN,
}


def gathered(sink):
    sink = getattr(sink, "losses", sink)
    return sink.get("aux", []) if isinstance(sink, dict) else sink


@pytest.mark.parametrize("forward", [adds_loss, adds_loss_and_reads])
@pytest.mark.parametrize("kind", SINKS)
def test_blocks_may_add_losses_to_an_argument(toy_model, toy_batch, run_steps, assert_same_steps, kind, forward):
    sink, lengths = SINKS[kind](), []

    def gathering():
        model = toy_model(forward, num_blocks=3, kwargs_of=lambda x: {"sink": sink})
        inner = model.forward

        def call(x):
            getattr(sink, "losses", sink).clear()
            result = inner(x)
            lengths.append(len(gathered(sink)))
            result.loss = result.loss + sum(gathered(sink))
            return result

        model.forward = call
        return model

    batch = toy_batch()
    plain = run_steps(gathering(), batch)
    model = gathering()
    profile = profile_model(model, batch, CONFIG)
    for policy in (uniform_policy(profile, "recompute"), random_policy(profile, 1, ("retain", "recompute"))):
        with apply_policy(model, policy, CONFIG):
            assert_same_steps(run_steps(model, batch), plain)
            assert len(gathered(sink)) == 3
    assert set(lengths) == {3}


def test_weights_that_forward_changes_are_refused(toy_model, toy_batch):
    def clamps(block, hidden):
        with torch.no_grad():
            block.up.weight.clamp_(-0.1, 0.1)
        return plain_block(block, hidden)

    with pytest.raises((UnrestorableError, RuntimeError), match=r"outside of forward|in place after the forward"):
        profile_model(toy_model(clamps), toy_batch(), CONFIG)


def test_embeddings_that_scale_their_rows_are_as_before():
    model = nn.Module()
    model.embedding = nn.Embedding(8, 8, max_norm=0.5)
    model.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in range(2))
    before = model.embedding.weight.detach().clone()

    def compute_loss(model, batch):
        hidden = model.embedding(batch["ids"])
        for layer in model.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    config = AdaccConfig(block_classes=("TransformerEncoderLayer",))
    profile_model(model.train(), {"ids": torch.arange(8)[None]}, config, compute_loss=compute_loss)
    assert torch.equal(model.embedding.weight, before)
