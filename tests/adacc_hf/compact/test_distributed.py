"""Two ranks on gloo train by CompAct as one process does on the whole batch. DDP exchanges the subspace alone."""

import pytest
from forked_runs import run_forked

SETUP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from adacc_hf.compact import CompactFactory

dist.init_process_group("gloo")
rank = dist.get_rank()


def build():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, use_cache=False, **sizes)).double().train()
    return model, CompactFactory()(model, rank=8, update_proj_gap=2)


def train(model, optimizer, rows):
    for step in range(5):
        ids = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(step))[rows]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

DDP = (
    SETUP
    + """
whole, optimizer = build()
train(whole, optimizer, slice(None))
ours, optimizer = build()
exchanged = []


def count(state, bucket):
    exchanged.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 2)


parallel = DistributedDataParallel(ours)
parallel.register_comm_hook(None, count)
train(parallel, optimizer, slice(2 * rank, 2 * rank + 2))
trained = sum(p.numel() for p in ours.parameters() if p.requires_grad)
assert sum(exchanged) == 5 * trained, (exchanged, trained)
for name, tensor in whole.state_dict().items():
    mine = ours.state_dict()[name]
    # Means of two halves in float64, after five steps of Adam, which divides by roots of small numbers.
    torch.testing.assert_close(mine, tensor, atol=1e-8, rtol=1e-6)
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine.contiguous())
    assert torch.equal(*others), name
print("equal")
dist.destroy_process_group()
"""
)


FSDP2 = (
    SETUP
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

whole, optimizer = build()
train(whole, optimizer, slice(None))
ours, optimizer = build()
names = {parameter: name for name, parameter in ours.named_parameters()}
mesh = init_device_mesh("cpu", (2,))
for block in ours.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(ours, mesh=mesh)
sharded = dict(ours.named_parameters())
for group in optimizer.param_groups:  # as Accelerate does, which prepares both
    group["params"] = [sharded[names[parameter]] for parameter in group["params"]]
train(ours, optimizer, slice(2 * rank, 2 * rank + 2))
for layer in optimizer.layers:
    assert layer.weight.to_local().shape[0] == layer.weight.shape[0] // 2
    assert optimizer.state[layer.core]["exp_avg"].to_local().shape == (layer.weight.shape[0] // 2, 8)
for name, tensor in whole.state_dict().items():
    mine = ours.state_dict()[name]
    # As above.
    torch.testing.assert_close(mine.full_tensor(), tensor, atol=1e-8, rtol=1e-6)
print("equal")
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("worker", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_two_ranks_are_one_process(tmp_path, worker):
    script = tmp_path / "worker.py"
    script.write_text(worker)
    process = run_forked(script, num_ranks=2)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("equal") == 2
