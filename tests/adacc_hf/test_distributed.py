"""Two ranks on gloo: DDP and FSDP2 train under policies bit for bit as without them."""

import pytest
from forked_runs import run_forked

WORKER = '''
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts import tiles
from adacc_hf.artifacts.plans import recompute_plan
from adacc_hf.solve.simple_policies import policy_of_plans, random_policy, uniform_policy

TILED = AdaccConfig(actions=("retain", "recompute", "tile"))
STEPS = 3
CONFIG = AdaccConfig(min_compress_bytes=0)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build():
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).train()


def batch(seed):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    ids = torch.randint(0, 61, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def shard(model, **settings):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loss_of(model, batches):
    """Return the loss of a batch, or the sum of the losses of a list of batches."""
    return sum(model(**each).loss for each in batches) if isinstance(batches, list) else model(**batches).loss


def train(model, twice):
    """Return losses, gradients and weights of some steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = loss_of(model, [batch(step), batch(step + 50)] if twice else batch(step))
        loss.backward()
        results += [loss.detach(), *(local(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results + [local(p.detach()).clone() for p in model.parameters()]


def policies(profile):
    actions = ("retain", "recompute", "compress")
    return [uniform_policy(profile, "recompute"), random_policy(profile, 1, actions, lossless=True)]


def applied(wrap, policy, before):
    """Return (the wrapped model under the policy, the policy's handle)."""
    model = build()
    if before:
        handle = apply_policy(model, policy, CONFIG)
        return wrap(model), handle
    model = wrap(model)
    return model, apply_policy(model, policy, CONFIG)


def check(name, before):
    wrap = WRAPPERS[name]
    twice = name.endswith("twice")
    plain = train(wrap(build()), twice)
    # A policy refers to blocks by names, which DDP changes, and by operators, which FSDP2's casts change.
    bare = name.startswith("fsdp2") and "bf16" not in name or (before and name == "ddp")
    compute_loss = (lambda model, batch: loss_of(model, [batch, batch])) if twice else None
    profile = profile_model(build() if bare else wrap(build()), batch(9), CONFIG, compute_loss=compute_loss)
    assert len(profile.blocks) == (4 if twice else 2)
    for policy in policies(profile):
        model, handle = applied(wrap, policy, before)
        ours = train(model, twice)
        assert not handle.uncalled() and not handle.tape_cache.fallbacks, handle.tape_cache.fallbacks
        assert all(executor.known_shapes for executor in handle.plans.strategies.values())
        handle.remove()
        assert len(ours) == len(plain)
        different = sum(not torch.equal(a, b) for a, b in zip(ours, plain))
        assert not different, f"rank {dist.get_rank()}: {different} of {len(plain)} tensors differ"
    print(f"{name} on rank {dist.get_rank()} is equal", flush=True)


def check_near(name, head):
    """Compare training with the chunked head, or in tiles, to plain training: the gradients differ by the order of sums
    only. The optimizer is made after the profile."""
    wrap, twice = WRAPPERS[name], name.endswith("twice")
    plain = train(wrap(build()), twice)
    compute_loss = (lambda model, batch: loss_of(model, [batch, batch])) if twice else None
    config = AdaccConfig(min_compress_bytes=0, head=head) if head else TILED
    model = wrap(build())
    is_bare = not head and name.startswith("fsdp2") and "bf16" not in name  # tiles need modules without hooks inside
    profile = profile_model(build() if is_bare else model, batch(9), config, compute_loss=compute_loss)
    assert name == "ddp" or all(hasattr(p, "to_local") for p in model.parameters()), "the parameters are sharded again"
    if head:
        policy = uniform_policy(profile.with_head("chunked"), "recompute")
    else:
        tiled = profile.with_tiles([3] * len(profile.blocks))
        policy = policy_of_plans(tiled, [recompute_plan(tiled.kind_of(block)) for block in tiled.blocks])
    with apply_policy(model, policy, config) as handle:
        ours = train(model, twice)
        assert not handle.tape_cache.fallbacks, handle.tape_cache.fallbacks
        assert all(executor.known_shapes for executor in handle.plans.strategies.values())
    # Three steps of SGD multiply the difference of the first gradients (test_tiles.py, test_chunked_loss.py) by less
    # than ten.
    tolerance = 1e-1 if "bf16" in name else 2e-5
    for mine, other in zip(ours, plain, strict=True):
        difference = float((mine - other).norm() / other.norm().clamp(min=1e-3))
        assert difference <= tolerance, f"rank {dist.get_rank()}: {difference}"
    print(f"{name} on rank {dist.get_rank()} is equal", flush=True)


WRAPPERS = {
    "ddp": torch.nn.parallel.DistributedDataParallel,
    "fsdp2": shard,
    "fsdp2-bf16": lambda model: shard(model, mp_policy=MIXED),
    "fsdp2-twice": shard,
}

torch.set_num_threads(1)
dist.init_process_group("gloo")
for name in WRAPPERS:
    if sys.argv[1] == "tiles":
        tiles.MIN_ROWS, tiles.MIN_TILE_ROWS = 8, 2
        check_near(name, None)
    elif sys.argv[1] == "head" and name != "ddp":
        check_near(name, "chunked")
    elif sys.argv[1] in ("before", "after"):
        check(name, before=sys.argv[1] == "before")
dist.destroy_process_group()
'''


@pytest.mark.parametrize("case", ["before", "after", "tiles", "head"])
def test_two_ranks_train_as_without_policy(tmp_path, case):
    """With a policy applied before or after the model is wrapped, with row-wise modules in tiles, or a chunked head."""
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    result = run_forked(tmp_path / "worker.py", case, num_ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    for wrapper in ("ddp", "fsdp2", "fsdp2-bf16", "fsdp2-twice")[case == "head" :]:
        for rank in range(2):
            assert f"{wrapper} on rank {rank} is equal" in result.stdout
