"""The Trainer under DDP with two gloo ranks. This file is also the script that the ranks run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from adacc_hf import AdaccCallback
from adacc_hf.artifacts.files import POLICY_FILE

NUM_STEPS = 6


class LogsAlone(Trainer):
    """Callback that logs a separate loss on the first rank."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.is_world_process_zero():
            self.log({"train_loss": loss.item()})
        return loss


def train(toys: Any, callbacks: list[Any], folder: Path, resume: str | None = None, **settings: Any) -> Trainer:
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = toys.tiny_trainer(
        folder, callbacks, max_steps=NUM_STEPS, per_device_train_batch_size=2, **saving, **settings
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def compare(toys: Any, folder: Path, **settings: Any) -> dict[str, Any]:
    """Return this rank's comparison of a lossless run, and of a run resumed from it, with plain DDP."""
    callback, resumed_callback = AdaccCallback(**toys.LOSSLESS), AdaccCallback(**toys.LOSSLESS)
    plain = train(toys, [], folder / "plain", **settings)
    adacc = train(toys, [callback], folder / "adacc", **settings)
    resumed = train(toys, [resumed_callback], folder / "resumed", str(folder / "adacc/checkpoint-3"), **settings)
    return {
        "ddp": type(adacc.model_wrapped).__name__,
        "losses": [toys.Run(run, run.state.log_history).losses for run in (plain, adacc, resumed)],
        "num_logs": [len(run.state.log_history) for run in (plain, adacc)],
        "equal": [_same_parameters(plain.model, run.model) for run in (adacc, resumed)],
        "recomputed": callback.policy.action_counts()["recompute"],
        "policies": [str(callback.policy), str(resumed_callback.policy)],
        "events": [
            [(e["step"], e["event"]) for e in c.history if e["event"] != "memory"] for c in (callback, resumed_callback)
        ],
    }


def _same_parameters(model: torch.nn.Module, other_model: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other_model.state_dict().values(), strict=True)
    return all(torch.equal(tensor, other_tensor) for tensor, other_tensor in pairs)


def run_rank(folder: Path) -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    # Transformers loads a rank's optimizer onto "cpu:0", which torch before 2.13 rejects.
    torch.serialization.register_package(
        100, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
    )
    results = compare(toys, folder, trainer_class=LogsAlone, gradient_accumulation_steps=2)
    toys.write_rank_results(folder, results)


@pytest.mark.gate
def test_lossless_training_is_bit_equal_to_plain_ddp(run_two_ranks, tmp_path):
    ranks = run_two_ranks(__file__)
    assert ranks[0]["policies"] == ranks[1]["policies"]
    for results in ranks:
        assert results["ddp"] == "DistributedDataParallel"
        assert results["equal"] == [True, True]
        assert results["recomputed"] > 0
        assert results["num_logs"][0] == results["num_logs"][1]
        assert results["policies"][0] == results["policies"][1]
        assert results["events"] == [[[1, "policy"]], [[1, "policy"], [4, "policy"]]]
    losses = ranks[0]["losses"]
    assert len(losses[0]) == NUM_STEPS
    assert losses[0] == losses[1] == losses[2]
    assert (tmp_path / "adacc" / "checkpoint-6" / POLICY_FILE).is_file()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
