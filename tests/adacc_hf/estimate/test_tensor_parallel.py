"""Plans of one rank under Transformers' tensor parallelism, against counted bytes of two gloo ranks, which this file
runs as their script."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_runs import run_forked
from settled_collectives import wait_for_threads
from torch.distributed import _functional_collectives as collectives
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.distributed import DistributedConfig

from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload
from adacc_hf.estimate.plan_report import to_text
from adacc_hf.estimate.planning import Request, training_profile
from adacc_hf.estimate.planning import plan as make_plan
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.meters import CpuMemoryMeter

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "biases and tied embeddings": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "fused projections": Phi3Config(**SIZES, pad_token_id=0),
}
BATCH, LENGTH = 4, 48


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def count_step(folder: Path) -> dict[str, int]:
    """Return the bytes of this rank in a plain step, and of its parameters and gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).train()
    ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    peaks = []
    for _ in range(2):
        model.zero_grad()
        with CpuMemoryMeter() as meter:
            model(**batch).loss.backward()
        peaks.append(meter.peak_bytes)
    tied = {id(parameter): parameter for parameter in model.parameters()}.values()
    storages = [local(parameter).untyped_storage().nbytes() for parameter in tied]
    gradients = sum(local(parameter.grad).untyped_storage().nbytes() for parameter in tied)
    # Without a GPU, the loader keeps a whole tensor for its shard.
    unused_bytes = sum(storages) - sum(local(parameter).nbytes for parameter in tied)
    return {
        "parameters": sum(storages) - unused_bytes,
        "gradients": gradients,
        "step": min(peaks),
    }


def run_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wait = collectives.wait_tensor

    def wait_longer(tensor: torch.Tensor) -> torch.Tensor:
        result = wait(tensor)
        wait_for_threads()  # until gloo's thread has freed the collective's tensors
        return result

    collectives.wait_tensor = wait_longer
    counted = {path.name: count_step(path) for path in sorted(folder.iterdir())}
    if dist.get_rank() == 0:
        print(json.dumps(counted), flush=True)
    dist.destroy_process_group()


def workload(config: PretrainedConfig, **options: Any) -> Workload:
    precision = PRECISIONS["fp32"]
    return Workload(config=config, device=find_device("cpu"), precision=precision, trace="cpu", **options)


def test_a_plan_predicts_the_bytes_of_a_rank(tmp_path: Path) -> None:
    for name, config in CONFIGS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    process = run_forked(__file__, str(tmp_path), num_ranks=2, timeout=120)
    assert process.returncode == 0, process.stderr[-8000:]
    counted = json.loads(process.stdout.splitlines()[-1])
    for name in CONFIGS:
        config = AutoConfig.from_pretrained(tmp_path / name)
        request = Request(
            model=name, workload=workload(config, ranks_per_layer=2), batch_size=BATCH, seq_len=LENGTH, optimizer="sgd"
        )
        static, profile = training_profile(request)
        peak = uniform_policy(profile, "retain").predicted_peak_bytes
        assert counted[name] == {
            "parameters": static.parameters_bytes,
            "gradients": static.gradients_bytes,
            "step": peak - profile.static_bytes,
        }, name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a small LLaMA."""
    path = tmp_path_factory.mktemp("llama")
    LlamaConfig(**SIZES).save_pretrained(path)
    return str(path)


def test_fsdp_shards_the_shards(plan: Any, llama: str) -> None:
    options = ("--batch-size", "2", "--seq-len", "32", "--tp", "2")
    alone, both = plan(*options, model=llama), plan(*options, "--fsdp", "4", model=llama)
    assert alone["ranks_per_layer"] == both["ranks_per_layer"] == 2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama))
    whole, norms = (sum(4 * p.numel() for p in model.parameters() if p.dim() < dims) for dims in (3, 2))
    shard, embedding = norms + (whole - norms) // 2, 4 * model.get_input_embeddings().weight.numel()
    assert alone["static"]["parameters_bytes"] == shard
    assert alone["static"]["gradients_bytes"] == shard + embedding // 2
    assert alone["static"]["optimizer_bytes"] == 2 * shard
    assert both["static"]["parameters_bytes"] == both["static"]["gradients_bytes"] == -(-shard // 4)
    assert alone["methods"]["plain"]["reserved_bytes"] is None, "the allocator is not simulated on several devices"


def test_the_text_names_the_ranks() -> None:
    request = Request(model="m", workload=workload(LlamaConfig(**SIZES), ranks_per_layer=2), batch_size=1, seq_len=8)
    text = to_text(make_plan(replace(request, find_largest=False)))
    assert "adamw, tensor parallel over 2, on" in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "1"], "--tp=1 must be at least 2"),
        (["--tp", "4"], "--tp=4 does not divide the model's attention heads [2, 4] and the sizes [32, 64, 96, 128] "),
        (["--tp", "2", "--ddp", "2"], "--tp is not planned with --ddp"),
        (["--tp", "2", "--zero", "3", "2"], "--tp is not planned with --zero"),
        (["--tp", "2", "--peft", "lora"], "--tp is not planned with --peft"),
        (["--tp", "2", "--optimizer", "compact"], "--tp is not possible with --optimizer compact"),
    ],
)
def test_what_is_refused(refusal_of: Any, llama: str, options: list[str], message: str) -> None:
    assert message in refusal_of(*options, model=llama)


def test_allowed_numbers_of_ranks_are_named(refusal_of: Any, llama: str) -> None:
    assert refusal_of("--tp", "3", model=llama).endswith("of its layers: choose 2")


def test_models_without_a_known_plan_are_refused(refusal_of: Any, tmp_path: Path) -> None:
    assert "--tp=2: GPT2LMHeadModel has no plan for tensor parallelism (tp_plan)" in refusal_of("--tp", "2")
    MixtralConfig(**SIZES, num_local_experts=2).save_pretrained(tmp_path)
    message = "--tp=2: the plan of MixtralForCausalLM has the style moe_tp_experts for model.layers.0.mlp.experts"
    assert message in refusal_of("--tp", "2", model=str(tmp_path))


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
