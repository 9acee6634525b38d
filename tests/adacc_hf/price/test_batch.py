"""The profiled batch."""

import torch

from adacc_hf.price.batch import Batch


def test_tensors_of_a_graph_are_detached():
    """A backward through the batch's tensors, also nested ones, frees no graph outside. Other tensors are unchanged."""
    ids, leaf = torch.arange(6).view(2, 3), torch.ones(2, 3, requires_grad=True)
    computed = leaf.sin()
    batch = Batch({"input_ids": ids, "leaf": leaf, "encoder_outputs": (computed, None)})
    assert batch.tensors["input_ids"] is ids
    assert batch.tensors["leaf"] is leaf
    detached = batch.tensors["encoder_outputs"][0]
    assert detached.is_leaf
    assert detached.requires_grad
    assert detached.data_ptr() == computed.data_ptr()
    detached.exp().sum().backward()
    computed.sum().backward()
    assert torch.equal(leaf.grad, leaf.cos())
