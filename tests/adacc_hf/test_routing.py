"""Mixtures of experts: backward uses the experts that the forward chose, whatever a policy recomputes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.run.blocks import CheckpointStrategy, Installation
from adacc_hf.solve.simple_policies import uniform_policy

EXPERTS = {name: a for name, a in architectures().items() if "moe" in name or a.family == "mixture of experts"}
LOOPS = {"jetmoe", "switch_transformers", "nllb-moe"}
"""Architectures that loop over experts whatever their configuration says."""
CASES = [(name, experts) for name in EXPERTS for experts in ("grouped_mm", "eager")]


class Decisions(TorchDispatchMode):
    """Mode that counts the operators which choose indices by comparing floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        has_data = any(tensor.is_floating_point() for tensor in tensors)
        # A cast of a number is no comparison: T5 casts logarithms of distances.
        if has_data and func is not torch.ops.aten._to_copy.default and any(t.dtype is torch.int64 for t in results):
            self.names.append(str(func))
        return result


def gradients(model, batch):
    """Return the gradients, and the names of the operators that chose indices in backward."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(**batch).loss
    with Decisions() as decisions:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], decisions.names


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_backward_chooses_no_expert(name, experts):
    architecture = EXPERTS[name]
    model, batch = architecture.build(), architecture.make_batch(2)
    model.config._experts_implementation = experts
    is_checkpointed = experts == "eager" or name in LOOPS
    plain, _ = gradients(model, batch)
    config = AdaccConfig(block_classes=architecture.block_classes)
    profile = profile_model(model, batch, config)
    with apply_policy(model, uniform_policy(profile, "recompute"), config):
        for _ in range(2):
            recomputed, decisions = gradients(model, batch)
            assert not decisions or is_checkpointed
            assert all(map(torch.equal, recomputed, plain))
    installation = Installation(model, architecture.block_classes)
    for function in installation.functions.values():
        function.strategy = CheckpointStrategy()
    _, decisions = gradients(model, batch)
    installation.remove()
    assert decisions, "under torch's checkpoint, experts are chosen again in backward"
