"""Effects of operators: random draws, and communication with other ranks that happens inside of an operator."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adacc_hf.tape.operator_effects import RankUse, RngUse
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
