"""What a call is given."""

import torch

from adacc_hf.tape.inputs import argument_tensors


def test_argument_tensors_are_found_in_containers():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(argument_tensors((a, [1, (b,)]), {"k": {"m": c}, "n": None}))
    assert [path for path, _ in found] == [(0,), (1, 1, 0), ("k", "m")]
    assert [tensor.numel() for _, tensor in found] == [1, 2, 3]
