"""Two gloo ranks whose compiled graphs our partitioner cuts. This file is also the script of each rank.

DDP splits a graph at the end of a gradient bucket, so that one step has several regions. Under FSDP2 blocks are
compiled one by one, and share one graph.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_runs import run_forked
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adacc_hf.compiler import AdaccPartitioner

NUM_BLOCKS = 3
WIDTH = 288
BUDGET = 0.7


class Block(nn.Module):
    """A block with the two properties that DDP's and FSDP2's wrapping needs: it is repeated, and has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def ddp(model: nn.Sequential, backend: Any) -> nn.Module:
    # More than two buckets: a block has 2.5 MiB of parameters.
    return torch.compile(DistributedDataParallel(model, bucket_cap_mb=3), backend=backend)


def fsdp2(model: nn.Sequential, backend: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
        block.compile(backend=backend)
    return fully_shard(model, mesh=mesh)


def as_it_is(partition: Any) -> Any:
    """Return a backend that runs the graphs that `partition` cuts."""
    keep = lambda module, _: make_boxed_func(module)  # noqa: E731
    return aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
    )


def train(model: nn.Module, partitioner: AdaccPartitioner | None = None) -> list[Tensor]:
    """Return losses and gradients of two steps, each rank with its own data."""
    results = []
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).square().mean()
        if partitioner is not None and step == 0:
            partitioner.count_calls(loss)
        loss.backward()
        results += [loss.detach(), *(_local(p.grad).clone() for p in model.parameters())]
        model.zero_grad()
    return results


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compare(wrap: Callable[[nn.Sequential, Any], nn.Module]) -> dict[str, Any]:
    torch._dynamo.reset()
    plain = train(wrap(build(), as_it_is(min_cut_rematerialization_partition)))
    torch._dynamo.reset()
    partitioner = AdaccPartitioner(memory_budget=BUDGET, min_compress_bytes=0, actions=("retain", "recompute"))
    ours = train(wrap(build(), as_it_is(partitioner)), partitioner)
    return {
        "different": sum(not torch.equal(one, other) for one, other in zip(ours, plain, strict=True)),
        "regions": [plan.region for plan in partitioner.policy.regions],
        "calls": [plan.calls for plan in partitioner.policy.regions],
        "bytes": [partitioner.policy.stored_bytes, partitioner.policy.plain_bytes],
    }


def run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {wrap.__name__: compare(wrap) for wrap in (ddp, fsdp2)}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def test_two_ranks_train_as_under_the_plain_partition(tmp_path: Path) -> None:
    process = run_forked(__file__, str(tmp_path), num_ranks=2)
    assert process.returncode == 0, process.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name in ("ddp", "fsdp2"):
        for rank in ranks:
            assert rank[name]["different"] == 0
            stored_bytes, plain_bytes = rank[name]["bytes"]
            assert 0 < stored_bytes <= BUDGET * plain_bytes
    split = ranks[0]["ddp"]
    num_buckets = len(set(split["regions"]))
    assert num_buckets > 1, "a bucket ends inside the model"
    assert split["calls"][:num_buckets] == [1] * num_buckets
    # The input of the first block needs no gradient, which makes it another graph.
    assert ranks[0]["fsdp2"]["calls"] == [1, NUM_BLOCKS - 1]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
