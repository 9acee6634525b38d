"""Fingerprints tell tensors apart by their bits, and estimate how far they differ."""

import math

import pytest
import torch

from adacc_hf.torch_glue.fingerprints import SAMPLE_ELEMENTS, fingerprint, gradient_fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_one_bit_makes_another_digest(dtype):
    tensor = torch.arange(1, 1001).to(dtype).view(20, 50)
    other = tensor.clone()
    assert fingerprint(other.T.contiguous().T) == fingerprint(tensor), "the layout does not count"
    other.view(torch.uint8)[-1, -1] ^= 1
    assert fingerprint(other).digest != fingerprint(tensor).digest


def test_errors_are_those_of_the_elements():
    tensor = torch.ones(10 * SAMPLE_ELEMENTS, dtype=torch.float32)
    left, right = fingerprint(tensor), fingerprint(tensor * 1.5)
    assert (right.relative_error(left), right.largest_difference(left)) == (0.5, 0.5)
    tensor[1] = 2.0  # not among the elements
    last = fingerprint(tensor)
    assert 0 < last.relative_error(left) < 0.01
    assert last.largest_difference(left) == 0.0
    assert left.relative_error(fingerprint(0 * tensor)) == math.inf
    assert fingerprint(torch.full((3,), math.inf)).largest_difference(fingerprint(torch.full((3,), math.inf))) == 0.0


def test_parameters_without_a_gradient_are_left_out():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    layer.bias.grad = None
    assert gradient_fingerprints(layer.named_parameters()) == {"gradient of weight": fingerprint(torch.ones(2, 2))}
