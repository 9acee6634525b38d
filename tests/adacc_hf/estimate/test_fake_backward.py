"""The node that an unpack is for, under torch's engine and under the backward over fake tensors."""

import torch
from function_builders import Square

from adacc_hf.estimate.fake_backward import FakeBackward
from adacc_hf.estimate.fake_device import fake_tensors
from adacc_hf.torch_glue.tensors import calling_node, current_node


def loss_and_unpacks():
    """A loss, and the names of the nodes in the order in which their saved tensors are unpacked."""
    names = []

    def unpack(tensor):
        node = current_node()
        names.append((type(node), node.name()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = Square.apply(torch.ones(2, requires_grad=True).exp()).sigmoid().sum()
    return loss, names


def test_backward_without_memory_unpacks_for_the_nodes_that_the_engine_does() -> None:
    real, expected = loss_and_unpacks()
    real.backward()
    with fake_tensors("cpu"):
        fake, names = loss_and_unpacks()
        FakeBackward().run(fake)
    assert names == expected
    assert [name for _, name in names] == ["SigmoidBackward0", "SquareBackward", "ExpBackward0"]


def test_a_callback_outlives_the_backward_of_another_graph() -> None:
    """While a step is recorded, blocks and heads run backwards of their own."""
    order = []
    with fake_tensors("cpu"):
        backward = FakeBackward()
        result = torch.ones(2, requires_grad=True).exp()
        backward.on_gradient(result, lambda: order.append("gradient"))
        backward.run(torch.ones(2, requires_grad=True).sum())
        order.append("other graph")
        backward.run(result.sum())
    assert order == ["other graph", "gradient"]


def test_the_engines_own_backward_inside_goes_first() -> None:
    node = torch.ones(2, requires_grad=True).exp().grad_fn
    with calling_node(node):
        loss, names = loss_and_unpacks()
        loss.backward()
        assert [name for _, name in names] == ["SigmoidBackward0", "SquareBackward", "ExpBackward0"]
        assert current_node() is node
    assert current_node() is None
