"""A gradient comparison runs the block again without side effects on gradients, counters, generators or lists."""

import logging
import random
import sys

import numpy
import pytest
import torch
from recomputed_models import recompute_all
from torch import nn
from torch.utils.checkpoint import checkpoint

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.adapt.gradient_check import BlockSample
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)
SEEN = []


class OwnBackward(torch.autograd.Function):
    """A Function that runs a module in parts in backward, where an inner backward computes the weights' gradients."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([run(part) for part in x.chunk(2, 1)], 1)

    @staticmethod
    def backward(ctx, gradient):
        (x,), parts = ctx.saved_tensors, []
        for part, own in zip(x.chunk(2, 1), gradient.chunk(2, 1), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.run(part)
            torch.autograd.backward(result, own)
            parts.append(part.grad)
        return torch.cat(parts, 1), None


def tail(block, hidden, x):
    return hidden + block.down(x.tanh())


def tiled(block, hidden):
    return tail(block, hidden, OwnBackward.apply(hidden, lambda part: block.up(part).sigmoid()))


def reentrant(block, hidden):
    return tail(block, hidden, checkpoint(lambda x: block.up(x).sigmoid(), hidden, use_reentrant=True))


def plain(block, hidden):
    return tail(block, hidden, block.up(hidden))


def normalizes(block, hidden):
    return tail(block, hidden, block.norm(block.up(hidden)))


def counts(block, hidden):
    block.num_calls += 1
    block.loads[0] += 1
    block.load = hidden.detach().sum() if block.load is None else block.load + hidden.detach().sum()
    SEEN.append(block.num_calls)
    return tail(block, hidden, block.up(hidden) * (1 + 0.1 * block.num_calls))


def draws(block, hidden):
    mask = torch.rand(hidden.shape, generator=block.generators[0]) > 0.3
    return tail(block, hidden, block.up(hidden) * mask * block.numpy_generator.random() * block.dice.random())


def writes(block, hidden):
    with torch.no_grad():
        block.count += 1
        block.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
    return tail(block, hidden, block.up(hidden) + block.mean.clone())


def setup(block):
    block.norm = nn.BatchNorm1d(6)
    block.num_calls, block.load, block.loads = 0, None, [0]
    block.generators, block.numpy_generator = (torch.Generator().manual_seed(1),), numpy.random.default_rng(1)
    block.dice = random.Random(1)
    block.register_buffer("count", torch.zeros(()))
    block.mean = torch.zeros(8)
    block.up.register_forward_hook(lambda module, args, output: block.loads.append(1))


def traces(model):
    state = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    state |= {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}
    for index, block in enumerate(model.layers):
        state[index] = [
            block.num_calls,
            None if block.load is None else float(block.load),
            list(block.loads),
            block.generators[0].get_state().tolist(),
            str(block.numpy_generator.bit_generator.state),
            block.dice.getstate(),
            block.mean.tolist(),
        ]
    return state, list(SEEN), torch.get_rng_state().tolist(), random.getstate()


@pytest.mark.parametrize("forward", [normalizes, plain, tiled, reentrant, counts, draws, writes])
def test_a_comparison_runs_the_traced_graph_and_leaves_no_trace(toy_model, toy_batch, forward, caplog):
    """No code of the block runs. A block whose operators no traced graph has is not compared."""
    SEEN.clear()
    model, batch, has_graph = toy_model(forward, setup=setup), toy_batch(), forward not in (tiled, reentrant, draws)

    def runs_code(run):
        called = set()
        sys.setprofile(lambda frame, *_: called.add(frame.f_code))
        try:
            run()
        finally:
            sys.setprofile(None)
        return forward.__code__ in called

    with recompute_all(model, batch, CONFIG, CONFIG) as handle:
        for number in range(1 if forward in (counts, writes) else 2):  # these are traced anew
            sample = BlockSample(handle.plans.strategies["layers.1"])
            assert runs_code(lambda: model(**batch).loss.backward())
            if number:
                model.zero_grad(set_to_none=True)
            before = traces(model)
            for _ in range(2):
                assert not runs_code(sample.compare)
                error = sample.compare()
                assert error == (0 if has_graph else None)
            sample.close()
            assert traces(model) == before
    assert has_graph or "Dynamo has traced no graph with the operators of its call" in caplog.text


def cross(block, hidden, memory, table):
    return tail(block, hidden, block.up(hidden) + memory * table["scale"])


def test_keyword_arguments_with_a_gradient_lead_nowhere(toy_model, toy_batch):
    """Gradients of keyword arguments are not followed, such as an encoder's output, whose graph is freed after the
    step."""
    outside, batch = nn.Linear(8, 8), toy_batch()

    def kwargs_of(x):
        return {"memory": outside(x).tanh(), "table": {"scale": outside.weight.sum().exp()}}

    model = toy_model(cross, kwargs_of=kwargs_of)
    model.outside = outside
    with recompute_all(model, batch, CONFIG, CONFIG) as handle:
        sample = BlockSample(handle.plans.strategies["layers.1"])
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
        assert sample.compare() == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("uses_saved", [False, True])
def test_a_graph_from_before_the_block_is_left_alone(toy_model, toy_batch, caplog, uses_saved):
    """The graph before the block is not run: outside parameters keep their gradients. If that graph is freed, a warning
    says why nothing is compared."""
    outside, batch = nn.Linear(8, 8), toy_batch()

    def reads_context(block, hidden):
        context = block.context[0]
        return tail(block, hidden, block.up(hidden) * (context.exp() if uses_saved else 1.0) + context)

    model = toy_model(reads_context)
    model.outside, inner = outside, model.forward
    contexts = [None]
    for block in model.layers:
        block.context = contexts

    def forward(x):
        contexts[0] = outside.bias.exp() if uses_saved else outside.bias + 1
        return inner(x)

    model.forward = forward
    profile = profile_model(model, batch, CONFIG)
    with apply_policy(model, uniform_policy(profile, "retain"), CONFIG) as handle:
        sample = BlockSample(handle.plans.strategies["layers.1"])
        model(**batch).loss.backward()
        before = outside.bias.grad.clone()
        with caplog.at_level(logging.WARNING, "adacc_hf"):
            error = sample.compare()
    assert (error is None) is uses_saved
    assert ("are not its arguments" in caplog.text) is uses_saved
    assert torch.equal(outside.bias.grad, before)
