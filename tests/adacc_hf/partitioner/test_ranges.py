"""What must not be compressed in a graph."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from adacc_hf.partitioner import functorch
from adacc_hf.partitioner.joint_graph import JointGraph, read_joint_graph
from adacc_hf.partitioner.ranges import spoiled_by_codecs


class Masked(nn.Module):
    """Scores with a float mask made of an integer one, and a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        mask = torch.where(attended.bool(), 0.0, torch.finfo(x.dtype).min)
        hidden = self.linear(self.norm(x))
        weights = (hidden @ hidden.transpose(-1, -2) + mask).softmax(-1)
        # What is chosen by a mask is no mask, wherever the truth of it comes from.
        weights = torch.where((mask == 0.0).any(), weights, 0.0)
        return weights @ hidden.tanh()


@pytest.fixture
def joint(fresh_dynamo: None) -> JointGraph:
    found: list[JointGraph] = []

    def partition(module: Any, inputs: Any, **kwargs: Any) -> Any:
        info = functorch.classify(module, kwargs.get("static_lifetime_input_indices") or (), kwargs["num_fwd_outputs"])
        held = functorch.held_inputs(module, info, kwargs["num_fwd_outputs"])
        found.append(read_joint_graph(module, info, held))
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    keep = lambda module, _: make_boxed_func(module)  # noqa: E731
    decompositions = select_decomp_table()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=decompositions)
    torch.manual_seed(0)
    x, attended = torch.randn(2, 8, 16, requires_grad=True), torch.ones(2, 1, 8, dtype=torch.int64)
    torch.compile(Masked(), backend=backend)(x, attended).sum().backward()
    return found[0]


def _targets(joint: JointGraph, values: set[int]) -> set[str]:
    return {str(joint.nodes[value].target).removeprefix("aten.").split(".")[0] for value in values}


def test_masks_and_what_they_are_added_to_are_spoiled(joint: JointGraph) -> None:
    spoiled = spoiled_by_codecs(joint)
    assert "where" in _targets(joint, spoiled)
    (scores,) = [i for i, n in enumerate(joint.nodes) if "add" in str(n.target) and "where" in str(n.all_input_nodes)]
    assert scores in spoiled


def test_what_is_chosen_by_the_look_of_a_mask_is_not(joint: JointGraph) -> None:
    (chosen,) = [i for i, n in enumerate(joint.nodes) if "where" in str(n.target) and "div" in str(n.all_input_nodes)]
    assert chosen not in spoiled_by_codecs(joint)


def test_statistics_of_norms_are_spoiled(joint: JointGraph) -> None:
    assert {"rsqrt"} <= _targets(joint, spoiled_by_codecs(joint))


def test_activations_and_attention_weights_are_not(joint: JointGraph) -> None:
    allowed = set(range(len(joint.nodes))) - spoiled_by_codecs(joint)
    assert {"addmm", "tanh", "exp", "div"} <= _targets(joint, allowed)
