"""Data that a block reads into Python: detected reads, and blocks that read."""

import numpy as np
import pytest
import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.operator_effects import watched_reads

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda t: t.tolist(), id="tolist"),
        pytest.param(lambda t: t.cpu().numpy(), id="numpy"),
        pytest.param(np.asarray, id="asarray"),
        pytest.param(lambda t: torch.split(torch.zeros(6), t.tolist()), id="split"),
    ],
)
def test_what_runs_no_operator_is_seen_too(read):
    """Reads without an operator, as for lists and arrays, are detected too. A dispatch mode would miss them."""
    reads = []
    with watched_reads(reads.append):
        read(torch.tensor([2, 4]))
    assert len(reads) == 1
    assert not {"tolist", "numpy"} & torch.Tensor.__dict__.keys()


@pytest.mark.parametrize("action", ["recompute", "retain"])
def test_other_data_at_one_shape_is_exact(toy_model, toy_batch, run_steps, assert_same_steps, action):
    """Blocks that split tokens at lengths, as Qwen2-VL's vision blocks do, run plainly or are checkpointed."""
    lengths = [[1, 3, 2]]

    def forward(block, hidden, counts):
        parts = [block.up(part).tanh().cumsum(1) for part in hidden.split(counts.tolist(), dim=1)]
        return hidden + block.down(torch.cat(parts, dim=1))

    model, batch = toy_model(forward, kwargs_of=lambda hidden: {"counts": torch.tensor(lengths[0])}), toy_batch()
    profile = profile_model(model, batch, CONFIG)
    assert all("Tensor.tolist" in kind.untrusted or "Dynamo" in kind.untrusted for kind in profile.kinds)
    for lengths[0] in ([1, 3, 2], [3, 2, 1], [2, 2, 2]):
        plain = run_steps(model, batch)
        with apply_policy(model, uniform_policy(profile, action), CONFIG):
            assert_same_steps(run_steps(model, batch), plain)
