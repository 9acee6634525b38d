"""The tensors among a call's arguments, and look-ups of the tensors that a block reads."""

import torch

from adacc_hf.tape.inputs import argument_tensors, find_external
from adacc_hf.tape.tape import Source


def test_argument_tensors_are_found_in_containers():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    paths_and_tensors = list(argument_tensors((a, [1, (b,)]), {"k": {"m": c}, "n": None}))
    assert [path for path, _ in paths_and_tensors] == [(0,), (1, 1, 0), ("k", "m")]
    assert [tensor.numel() for _, tensor in paths_and_tensors] == [1, 2, 3]


class GatheringTable(dict):
    """Table of parameters whose `[]` communicates with other ranks, as that of DeepSpeed's ZeRO 3 does."""

    def __getitem__(self, name):
        raise AssertionError(f"a look-up has gathered {name}")


def test_a_look_up_gathers_no_parameter():
    block = torch.nn.Linear(2, 2)
    weight = block.weight
    weight.scale = torch.ones(1)
    block._parameters = GatheringTable(block._parameters)
    assert find_external(Source("parameter", ("weight",)), block, (), {}) is weight
    assert torch.equal(find_external(Source("attached", ("weight", "scale")), block, (), {}), weight.scale)
