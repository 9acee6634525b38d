"""The Trainer with FSDP as Accelerate prepares it, on two gloo ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from run_builders import InOrder, Lengths
from transformers import Trainer, TrainingArguments

from adacc_hf import AdaccCallback

NUM_STEPS = 3
CONFIGS: dict[str, dict[str, Any]] = {
    "FSDPGPT2LMHeadModel": {"version": 2},
    "FullyShardedDataParallel": {"version": 1, "sync_module_states": "false"},
}
"""Settings by the name of the prepared model's class."""

LENGTHS = [32, 24, 16, 30, 32, 12]
"""Length of each batch. The two ranks take turns, so that their batches differ in length."""


def train(
    toys: Any, callbacks: list[Any], folder: Path, config: dict[str, Any], num_micro: int, data: Any = None
) -> Trainer:
    AcceleratorState._reset_state()
    args = TrainingArguments(
        str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=num_micro,
        logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, seed=3, fsdp=True,
        fsdp_config=dict(config),
    )  # fmt: skip
    # Accelerate gives several processes on CPUs DDP, whatever `fsdp` says.
    PartialState()._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    trainer_class = Trainer if data is None else InOrder
    trainer = trainer_class(toys.tiny_model(), args, train_dataset=data or toys.Tokens(), callbacks=callbacks)
    trainer.train()
    return trainer


def figures(trainer: Trainer) -> list[Any]:
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def parts(trainer: Trainer) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]


def compare(toys: Any, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's results: bit equality with plain training, and the size of the gradients waiting for the
    exchange."""
    adacc, of_lengths = (AdaccCallback(**toys.LOSSLESS) for _ in range(2))
    plain, adacc_run = (train(toys, callbacks, folder, config, num_micro=2) for callbacks in ([], [adacc]))
    plain_lengths, adacc_lengths = (
        train(toys, callbacks, folder, config, num_micro=1, data=Lengths(LENGTHS, batch_size=2))
        for callbacks in ([], [of_lengths])
    )
    waiting_bytes = adacc.profile.static_bytes - of_lengths.profile.static_bytes
    return {
        "class": type(adacc_run.model).__name__,
        "figures": [figures(plain), figures(adacc_run)],
        "equal": all(map(torch.equal, parts(plain), parts(adacc_run))),
        "lengths": [figures(plain_lengths), figures(adacc_lengths)],
        "lengths_equal": all(map(torch.equal, parts(plain_lengths), parts(adacc_lengths))),
        "policy_steps": [event["step"] for event in of_lengths.history if event["event"] == "policy"],
        "fallbacks": [event for event in of_lengths.history if event["event"] == "fallback"],
        "recomputed": adacc.policy.action_counts()["recompute"],
        "waiting": waiting_bytes / sum(4 * parameter.numel() for parameter in toys.tiny_model().parameters()),
    }


def run_rank(folder: Path, name: str) -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    toys.write_rank_results(folder, compare(toys, folder, CONFIGS[name]))


@pytest.mark.parametrize(
    "name", [pytest.param("FSDPGPT2LMHeadModel", marks=pytest.mark.gate), "FullyShardedDataParallel"]
)
def test_lossless_training_is_bit_equal_and_whole_gradients_are_planned_for(run_two_ranks, name: str) -> None:
    for results in run_two_ranks(__file__, name):
        assert results["class"] == name
        assert results["figures"][0] == results["figures"][1]
        assert results["equal"]
        assert results["recomputed"] > 0
        assert results["lengths"][0] == results["lengths"][1]
        assert results["lengths_equal"]
        assert results["policy_steps"][0] == 1, "the second step runs under a policy"
        reasons = {event["reason"] for event in results["fallbacks"]}
        assert reasons <= {"full recomputation, because there is no policy for batches of this size"}
        # Ranks exchange gradients after the last micro-batch. Until then each rank holds whole gradients instead of its
        # half.
        assert 0.95 < results["waiting"] < 1.05


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2])
