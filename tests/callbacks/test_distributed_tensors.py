"""The Trainer with a tensor-parallel model on two gloo ranks. This file is also the script that the ranks run."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from adacc_hf import AdaccCallback

NUM_STEPS = 6
# Gloo's threads may hold a few tensors for a moment: 0.04 MiB, where 1.05 MiB are the least and a plain step needs
# 1.28. The budgets leave room for that and still need other actions.
SETTINGS: dict[str, dict[str, Any]] = {
    "lossless": {"memory_budget": 0.5, "actions": ("retain", "recompute")},
    "bytes": {"memory_budget": "1.2MiB", "actions": ("retain", "recompute")},
    "codecs": {"memory_budget": 0.6, "actions": ("retain", "compress"), "min_compress_bytes": 0, "tracking": 2},
}


def train(toys: Any, callbacks: list[Any], folder: Path, parallelism: ParallelismConfig | None = None) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=DistributedConfig(tp_size=2))
    args = TrainingArguments(
        str(folder / "run"), max_steps=NUM_STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, seed=3,
        parallelism_config=parallelism,
    )  # fmt: skip
    # Accelerate requires GPUs here, without another reason to refuse a CPU.
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        trainer = Trainer(model, args, train_dataset=toys.Tokens(), callbacks=callbacks)
    trainer.train()
    return trainer


def figures(trainer: Trainer) -> tuple[list[float], list[float]]:
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [log["loss"] for log in logs], [log["grad_norm"] for log in logs]


def parts(trainer: Trainer) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]


def run_rank(folder: Path) -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    plain = train(toys, [], folder, ParallelismConfig(tp_size=2))
    results = {"plain": {"figures": figures(plain)}}
    for name, settings in SETTINGS.items():
        adacc = AdaccCallback(**settings)
        adacc_run = train(toys, [adacc], folder)
        results[name] = {
            "figures": figures(adacc_run),
            "equal": all(map(torch.equal, parts(adacc_run), parts(plain))),
            "policy": str(adacc.policy),
            "actions": adacc.policy.action_counts(),
            "tracked": sum(event["event"] == "tracking" for event in adacc.history),
        }
    toys.write_rank_results(folder, results)


def test_lossless_training_is_bit_equal_and_codecs_are_tracked(run_two_ranks, tmp_path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=98, max_position_embeddings=32, use_cache=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    ranks = run_two_ranks(__file__)
    for name in SETTINGS:
        assert ranks[0][name]["policy"] == ranks[1][name]["policy"]
    for rank in ranks:
        for name in ("lossless", "bytes"):
            assert rank[name]["equal"]
            assert rank[name]["figures"] == rank["plain"]["figures"]
            assert rank[name]["actions"]["recompute"] > 0
        assert rank["codecs"]["actions"]["compress"] > 0
        assert rank["codecs"]["tracked"] == 3, "steps 2, 3 and 5, because the policy was set before step 1"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
