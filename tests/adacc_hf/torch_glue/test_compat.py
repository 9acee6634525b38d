"""Names and behaviour of Transformers and torch that a release may change."""

import torch
from torch.distributed.fsdp import FSDPModule

from adacc_hf.torch_glue import compat


def test_class_names_are_those_before_fsdp2(tiny_gpt2):
    block = tiny_gpt2().transformer.h[0]
    assert compat.class_name(block) == "GPT2Block"
    block.__class__ = type("FSDPGPT2Block", (FSDPModule, type(block)), {})
    assert compat.class_name(block) == "GPT2Block"


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_an_owner_keeps_the_graph_of_a_tensor_that_is_gone():
    x = torch.ones(1, requires_grad=True)
    owner = compat.graph_owner(Twice.apply(x * 3))
    node = owner if owner.name() == "TwiceBackward" else owner.next_functions[0][0]
    assert node.name() == "TwiceBackward"
    assert node.next_functions[0][0].name() == "MulBackward0"
    assert compat.owns_graph_node(owner)


def test_a_cast_tells_what_it_is_a_copy_of():
    leaf = torch.ones(2, requires_grad=True)
    assert compat.cast_source(leaf.to(torch.bfloat16)) is leaf
    others = [leaf, leaf * 2, leaf.detach().to(torch.bfloat16), (leaf * 2).to(torch.bfloat16), leaf.double().float()]
    assert [compat.cast_source(tensor) for tensor in others] == [None] * 5
