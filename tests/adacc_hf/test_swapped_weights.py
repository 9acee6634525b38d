"""Parameters and buffers whose memory is replaced between forward and backward, as moving averages of weights do."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


def forward(block, hidden):
    normal = block.norm(hidden) * block.scale
    return hidden + block.down(torch.nn.functional.gelu(block.up(normal)))


def setup(block):
    block.norm = nn.LayerNorm(8)
    block.register_buffer("scale", torch.full((8,), 1.5))


def swap(tensors):
    for tensor in tensors:
        tensor.data = tensor.data * 1.25


def swap_flat(model):
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 1.25, model.parameters())


SWAPS = {
    "all parameters": lambda model: swap(model.parameters()),
    "norms": lambda model: swap(p for name, p in model.named_parameters() if "norm" in name),
    "biases": lambda model: swap(p for name, p in model.named_parameters() if name.endswith("bias")),
    "buffers": lambda model: swap(model.buffers()),
    "one flat vector": swap_flat,
    "one block": lambda model: swap(model.layers[0].parameters()),
}


def gradients(model, batch, change):
    """Return the gradients of a step in which `change` is applied between forward and backward."""
    before = [tensor.data for tensor in (*model.parameters(), *model.buffers())]
    torch.manual_seed(0)
    loss = model(**batch).loss
    change(model)
    loss.backward()
    for tensor, data in zip((*model.parameters(), *model.buffers()), before, strict=True):
        tensor.data = data
    results = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return results


@pytest.mark.parametrize("name", SWAPS)
def test_gradients_are_those_of_plain_training(toy_model, toy_batch, name):
    model, batch = toy_model(forward, setup=setup), toy_batch()
    plain = gradients(model, batch, SWAPS[name])
    profile = profile_model(model, batch, CONFIG)
    lossless = [random_policy(profile, seed, ("retain", "recompute")) for seed in range(3)]
    for policy in (uniform_policy(profile, "recompute"), *lossless):
        with apply_policy(model, policy, CONFIG):
            for _ in range(3):
                assert all(map(torch.equal, gradients(model, batch, SWAPS[name]), plain))
