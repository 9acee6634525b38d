"""torch.compile with our backend, through Inductor to machine code."""

import pytest
import torch
from torch import nn

from adacc_hf.partitioner.backend import adacc

# Importing Inductor makes torch warn of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_trains_under_the_backend() -> None:
    torch.manual_seed(0)
    # The mask of what lies above zero is handed over as bits.
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU())
    x = torch.randn(128, 64)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    options = {"memory_budget": 0.4, "min_compress_bytes": 0, "codecs": ("int8",)}
    compiled = torch.compile(model, backend=adacc, options=options)
    compiled(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        # INT8 in groups of 64 is off by 0.006 on normal noise; a few such tensors enter each gradient.
        assert (parameter.grad - gradient).norm() < 0.03 * gradient.norm()


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"options=\['budget'\] are unknown to backend 'adacc': choose from memory_b"):
        adacc(torch.fx.symbolic_trace(nn.Linear(2, 2)), [torch.ones(1, 2)], options={"budget": 0.5})
