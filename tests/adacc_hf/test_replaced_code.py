"""Code that is replaced during a run runs from the next step on, as in plain training."""

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adacc_hf import AdaccSession

STEPS, CHANGED_AT = 6, 3


def make_model():
    """Return a model of new classes, so that a test can change the classes."""

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def act(self, x):
            return F.gelu(x)

        def forward(self, x):
            return self.down(self.act(self.up(x)))

    class Block(nn.Module):
        gain = 1.0

        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(16), Mlp()

        def forward(self, x):
            return x + self.mlp(self.norm(x)) * self.gain

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inlet, self.blocks = nn.Embedding(20, 16), nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(16, 20)

        def forward(self, ids):
            x = self.inlet(ids)
            for block in self.blocks:
                x = block(x)
            return types.SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()))

    torch.manual_seed(0)
    return Net().train()


def half(self, x):
    return x + 0.5 * self.mlp(self.norm(x)).relu()


def subclass_of(cls):
    return type("Block", (cls,), {"forward": half})


CHANGES = {
    "forward of the class": lambda blocks: setattr(type(blocks[0]), "forward", half),
    "class of a block": lambda blocks: setattr(blocks[1], "__class__", subclass_of(type(blocks[1]))),
    "forward of a block": lambda blocks: setattr(blocks[1], "forward", types.MethodType(half, blocks[1])),
    "forward of a submodule's class": lambda blocks: setattr(
        type(blocks[0].mlp), "forward", lambda self, x: self.down(x.tile(2))
    ),
    "function that a module calls": lambda blocks: setattr(blocks[2].mlp, "act", torch.tanh),
}


def losses_of(change, budget):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"memory_budget": budget, "actions": ("retain", "recompute"), "block_classes": ("Block",)}
    session = AdaccSession(model, optimizer, **settings) if budget else None
    losses = []
    for step in range(STEPS):
        if step == CHANGED_AT:
            change(model.blocks)
        ids = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(step))

        def train(ids=ids):
            loss = model(ids=ids).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

        if session is None:
            train()
        else:
            with session.step({"ids": ids}):
                train()
    if session is not None:
        session.close()
    return losses


@pytest.mark.usefixtures("tiny_budgets")
@pytest.mark.parametrize("name", CHANGES)
def test_replaced_code_runs_from_the_next_step_on(name):
    plain = losses_of(CHANGES[name], None)
    assert plain != losses_of(lambda blocks: None, None)
    assert losses_of(CHANGES[name], 0.5) == plain
