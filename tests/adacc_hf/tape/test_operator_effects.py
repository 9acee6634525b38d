"""Effects of operators: random draws, reads of data into Python, and communication inside of an operator."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.tape.operator_effects import RankUse, RngUse, watched_reads
from adacc_hf.tape.recorder import Recorder


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_draw_that_reads_no_tensor_is_looked_for_on_the_device_it_names(monkeypatch, device):
    class Generator:
        offset = 0

        def initial_seed(self):
            return 1

        def get_offset(self):
            return self.offset

    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    drawings = [RngUse(torch.ops.aten.rand.default, ([4],), {"device": torch.device(device)}) for _ in range(2)]
    assert not drawings[0].happened()
    generator.offset += 4
    assert drawings[1].happened()


@torch.library.custom_op("adacc_test::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: torch.Tensor, group_name: str) -> torch.Tensor:
    result = x.clone()
    dist.all_reduce(result)
    return result


@torch.library.custom_op("adacc_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.usefixtures("one_rank")
def test_an_operator_that_communicates_inside_never_runs_again():
    """DeepSpeed's `dim_zero_all_to_all` is such an operator. Its argument names a group of ranks."""

    class Block(nn.Module):
        def forward(self, x):
            return doubled(sum_over_ranks(x * 3, "group of rank 0")).exp()

    block, x = Block(), torch.randn(3)
    recorder = Recorder(block, (x,), {})
    with recorder:
        block(x)
    operators = {operator.short_name: operator for operator in recorder.tape().operators}
    assert [name for name, operator in operators.items() if operator.is_collective] == ["sum_over_ranks"]
    assert not operators["sum_over_ranks"].may_run_again
    assert len(operators["sum_over_ranks"].args) == 1, "the ranks of different groups have equal tapes"
    assert operators["doubled"].may_run_again


def test_without_other_ranks_no_operator_communicates():
    use = RankUse(torch.ops.adacc_test.doubled.default)
    assert not use.happened()


@pytest.mark.usefixtures("one_rank")
def test_if_a_group_counts_no_collectives_each_operator_of_a_package_may_communicate(monkeypatch):
    def fails(group):
        raise RuntimeError("this backend has no sequence numbers")

    monkeypatch.setattr("adacc_hf.torch_glue.private.collective_count", fails)
    assert RankUse(torch.ops.adacc_test.doubled.default).happened()
    assert not RankUse(torch.ops.aten.mul.Tensor).happened()


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
