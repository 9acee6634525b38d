"""Profiling by hand restores all that a model's Python code counts, draws and gathers."""

import collections
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.errors import UncalledBlocksError, UnrestorableError
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0, actions=("retain", "recompute"))
SEEN = []


def plain_block(block, hidden):
    return hidden + block.down(block.up(hidden).tanh())


def factor_of(number):
    return 1 + 0.1 * number


COUNTERS = {
    "list": (lambda model: setattr(model, "box", [0]), lambda model: model.box.__setitem__(0, model.box[0] + 1)),
    "nested": (
        lambda model: setattr(model, "box", {"a": [{"n": 0}]}),
        lambda model: model.box["a"][0].update(n=model.box["a"][0]["n"] + 1),
    ),
    "class": (
        lambda model: setattr(type(model), "box", 0),
        lambda model: setattr(type(model), "box", type(model).box + 1),
    ),
    "Counter": (lambda model: setattr(type(model), "box", collections.Counter()), lambda model: model.box.update("n")),
    "tensor in a list": (lambda model: setattr(model, "box", [torch.zeros(())]), lambda model: model.box[0].add_(1)),
    "None": (lambda model: setattr(model, "box", None), lambda model: setattr(model, "box", (model.box or 0) + 1)),
    "object": (
        lambda model: setattr(model, "box", SimpleNamespace(n=0)),
        lambda model: setattr(model.box, "n", model.box.n + 1),
    ),
    "set": (lambda model: setattr(model, "box", set()), lambda model: model.box.add(len(model.box))),
    "deque": (lambda model: setattr(model, "box", collections.deque()), lambda model: model.box.append(1)),
    "numpy": (lambda model: setattr(model, "box", numpy.zeros(())), lambda model: model.box.__iadd__(1)),
}


def number_in(box):
    """Return the count in a container of any kind."""
    box = getattr(box, "n", box)
    if isinstance(box, dict) and "a" in box:
        return box["a"][0]["n"]
    if isinstance(box, collections.Counter):
        return sum(box.values())
    if isinstance(box, list):
        return float(box[0])
    return len(box) if isinstance(box, (set, collections.deque)) else float(box or 0)


@pytest.mark.parametrize("kind", COUNTERS)
def test_a_schedule_by_a_counter_of_the_model_goes_on(toy_model, toy_batch, run_steps, assert_same_steps, kind):
    setup, count = COUNTERS[kind]

    def counting():
        model = toy_model(plain_block)
        setup(model)
        forward = model.forward

        def counting_forward(x):
            result = forward(x)
            count(model)
            result.loss = result.loss * factor_of(number_in(model.box))
            return result

        model.forward = counting_forward
        return model

    batch = toy_batch()
    plain = run_steps(counting(), batch)
    model = counting()
    profile = profile_model(model, batch, CONFIG)
    assert number_in(model.box) == 0
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(run_steps(model, batch), plain)


GATHERERS = {
    "list of the loss": lambda sink: lambda x: sink.append(x),
    "global list": lambda sink: lambda x: SEEN.append(x),
    "closure": lambda sink: closure(),
}


def closure():
    total = 0.0

    def gather(x):
        nonlocal total
        total = total + float(x.detach())
        return total

    return gather


@pytest.mark.parametrize("kind", GATHERERS)
def test_what_the_loss_gathers_is_as_before(toy_model, toy_batch, kind):
    SEEN.clear()
    sink = []
    gather = GATHERERS[kind](sink)
    model = toy_model(plain_block)

    def compute_loss(model, batch):
        loss = model(**batch).loss
        gather(loss)
        return loss * (1 + len(sink) + len(SEEN))

    profile_model(model, toy_batch(), CONFIG, compute_loss=compute_loss)
    assert sink == SEEN == []
    if kind == "closure":
        assert gather(torch.zeros(())) == 0.0


# Random numbers decide which blocks run, and how often.

DRAWS = {
    "torch": lambda model: float(torch.rand(())),
    "python": lambda model: random.random(),
    "numpy": lambda model: numpy.random.rand(),
    "own torch.Generator": lambda model: float(torch.rand((), generator=model.own)),
    "own numpy generator": lambda model: model.own_numpy.random(),
    "own Random in a list": lambda model: model.own_python[0].random(),
}


def drawing_model(toy_model, draw, walk):
    model = toy_model(plain_block, num_blocks=3)
    model.own, model.own_numpy = torch.Generator().manual_seed(5), numpy.random.default_rng(5)
    model.own_python = [random.Random(5)]

    def forward(x):
        hidden = model.inlet(x)
        for layer in walk(model, draw):
            hidden = layer(hidden)
        return SimpleNamespace(loss=model.head(hidden).square().mean())

    model.forward = forward
    return model


def loops(model, draw):
    first, second, third = model.layers
    return [first, *[second] * (1 + int(3 * draw(model))), third]


def skips(model, draw):
    return [layer for layer in model.layers if draw(model) < 0.7]


def seeded_steps(run_steps, model, batch):
    random.seed(3)
    numpy.random.seed(3)
    return run_steps(model, batch, num_steps=6)


@pytest.mark.parametrize("kind", DRAWS)
def test_how_often_a_block_runs_may_be_drawn(toy_model, toy_batch, run_steps, assert_same_steps, kind):
    batch = toy_batch()
    plain = seeded_steps(run_steps, drawing_model(toy_model, DRAWS[kind], loops), batch)
    model = drawing_model(toy_model, DRAWS[kind], loops)
    profile = profile_model(model, batch, CONFIG)
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(seeded_steps(run_steps, model, batch), plain)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_which_blocks_run_may_be_drawn(toy_model, toy_batch, run_steps, assert_same_steps, kind):
    batch = toy_batch()
    plain = seeded_steps(run_steps, drawing_model(toy_model, DRAWS[kind], skips), batch)
    model = drawing_model(toy_model, DRAWS[kind], skips)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    profile = profile_model(model, batch, CONFIG)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert len(profile.blocks) == 3
    with apply_policy(model, uniform_policy(profile, "recompute"), CONFIG):
        assert_same_steps(seeded_steps(run_steps, model, batch), plain)


def test_blocks_that_no_draw_runs_are_named(toy_model, toy_batch):
    model = drawing_model(toy_model, DRAWS["torch"], lambda model, draw: [*model.layers][: 2 + int(draw(model))])
    with pytest.raises(UncalledBlocksError, match=r"layers\.2 first"):
        profile_model(model, toy_batch(), CONFIG)


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


# Changes that cannot be restored are refused.


def test_an_iterator_in_forward_is_refused(toy_model, toy_batch):
    def advances(block, hidden):
        return plain_block(block, hidden) * next(block.factors)

    model = toy_model(advances, setup=lambda block: setattr(block, "factors", (1.0 for _ in iter(int, 1))))
    model.layers[0].factors = iter([1.0, 2.0] * 99)
    with pytest.raises(UnrestorableError, match="instead of this iterator"):
        profile_model(model, toy_batch(), CONFIG)


def test_weights_that_forward_changes_are_refused(toy_model, toy_batch):
    def clamps(block, hidden):
        with torch.no_grad():
            block.up.weight.clamp_(-0.1, 0.1)
        return plain_block(block, hidden)

    with pytest.raises((UnrestorableError, RuntimeError), match="outside of forward"):
        profile_model(toy_model(clamps), toy_batch(), CONFIG)


def test_hooks_that_forward_adds_are_gone(toy_model, toy_batch):
    def hooks(block, hidden):
        block.up.register_forward_hook(lambda *_: None)
        return plain_block(block, hidden)

    model = toy_model(hooks)
    profile_model(model, toy_batch(), CONFIG)
    assert not any(module._forward_hooks for module in model.modules())


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
