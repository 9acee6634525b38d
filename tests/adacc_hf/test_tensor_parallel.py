"""Models divided between two gloo ranks by layers, tensors or experts. This file is also the script of each rank.

The ranks follow different policies in the same step, which must neither change a bit nor leave a rank waiting.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_runs import run_forked
from settled_collectives import wait_for_threads
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

from adacc_hf import AdaccConfig, apply_policy, profile_model, solve_policy
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.memory import count_static_bytes
from adacc_hf.torch_glue.meters import CpuMemoryMeter

CONFIG = AdaccConfig(min_compress_bytes=0, head="plain")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "attention_dropout": 0.1,
}  # fmt: skip
IDS = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": IDS, "labels": IDS}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def by_torch() -> torch.nn.Module:
    """Divide the model by torch's own API, in which collectives' results arrive when they are read."""
    model, mesh = llama(), init_device_mesh("cpu", (2,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)
    return model.train()


def loader_of(folder: Path, **sizes: int) -> Callable[[], torch.nn.Module]:
    return lambda: AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes)).train()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return losses and this rank's gradients of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(**BATCH).loss
        loss.backward()
        results += [loss.detach(), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return results


def compare(build: Callable[[], torch.nn.Module]) -> Any:
    """Assert that lossless policies, different on each rank, change no bit of training. Return the model's profile."""
    plain = train(build())
    profile = profile_model(build(), BATCH, CONFIG)
    mine = random_policy(profile, dist.get_rank(), ("retain", "recompute", "compress"), lossless=True)
    for policy in (uniform_policy(profile, "recompute"), mine):
        model = build()
        with apply_policy(model, policy, CONFIG):
            ours = train(model)
        assert len(ours) == len(plain)
        assert all(map(torch.equal, ours, plain))
    return profile


def check_memory(build: Callable[[], torch.nn.Module], profile: Any) -> None:
    """Assert that steps with codecs take the predicted memory, and that the first count of static bytes is right."""
    model = build()
    parameters = sum(local(parameter).untyped_storage().nbytes() for parameter in model.parameters())
    assert count_static_bytes(model, {}) - parameters < 1024, "buffers: the frequencies of rotary embeddings"
    policy = solve_policy(profile, 0.25, CONFIG)
    assert policy.action_counts()["compress"] > 0
    peaks = []
    with apply_policy(model, policy, CONFIG):
        for _ in range(5):
            static = count_static_bytes(model, BATCH)
            with CpuMemoryMeter() as meter:
                model(**BATCH).loss.backward()
            model.zero_grad()
            peaks.append(static + meter.peak_bytes)
    # The first two steps are recorded, which needs extra memory. In any step, gloo's thread may free tensors late. The
    # profile counts a small tensor that gloo's thread has freed in the other steps.
    assert 0 <= policy.predicted_peak_bytes - min(peaks[2:]) < 1024


def let_go_of_buffers() -> None:
    """Wait until gloo's thread has freed a collective's tensors, because it frees them at any later time."""
    wait = collectives.wait_tensor

    def wait_longer(tensor: torch.Tensor) -> torch.Tensor:
        result = wait(tensor)
        wait_for_threads()
        return result

    collectives.wait_tensor = wait_longer


def run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert all(kind.untrusted is None for kind in compare(by_torch).kinds)
    tensors = loader_of(folder / "llama", tp_size=2)
    let_go_of_buffers()
    check_memory(tensors, compare(tensors))
    assert all(kind.untrusted is None for kind in compare(loader_of(folder / "mixtral", tp_size=2)).kinds)
    if hasattr(DistributedConfig(), "ep_size"):  # since Transformers 5.21
        experts = compare(loader_of(folder / "mixtral", tp_size=2, ep_size=2))
        assert all("reads data" in kind.untrusted for kind in experts.kinds)
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the models."""
    llama().save_pretrained(tmp_path / "llama")
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).save_pretrained(tmp_path / "mixtral")
    return tmp_path


def test_ranks_that_share_each_layer_train_as_without_a_policy(models: Path) -> None:
    process = run_forked(__file__, str(models), num_ranks=2, timeout=250)
    assert process.returncode == 0, process.stderr[-8000:]
    assert all(f"rank {rank} is done" in process.stdout for rank in range(2))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
