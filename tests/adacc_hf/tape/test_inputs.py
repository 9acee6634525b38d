"""The tensors among a call's arguments."""

import torch

from adacc_hf.tape.inputs import argument_tensors


def test_argument_tensors_are_found_in_containers():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    paths_and_tensors = list(argument_tensors((a, [1, (b,)]), {"k": {"m": c}, "n": None}))
    assert [path for path, _ in paths_and_tensors] == [(0,), (1, 1, 0), ("k", "m")]
    assert [tensor.numel() for _, tensor in paths_and_tensors] == [1, 2, 3]
