"""The Trainer with torch_compile=True under DDP with two gloo ranks."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from adacc_hf import AdaccCallback

NUM_STEPS = 5


def train(toys: Any, callbacks: list[Any], folder: Path) -> Trainer:
    settings = {"model": toys.tiny_model(n_layer=1), "max_steps": NUM_STEPS, "torch_compile": True}
    trainer = toys.tiny_trainer(folder, callbacks, per_device_train_batch_size=2, **settings)
    trainer.train()
    return trainer


def run_rank(folder: Path) -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    fraction, peak = AdaccCallback(**toys.LOSSLESS), AdaccCallback(**{**toys.LOSSLESS, "memory_budget": "1GiB"})
    with toys.run_graphs_eagerly():
        runs = [train(toys, callbacks, folder) for callbacks in ([], [fraction], [peak])]
    states = [run.model.state_dict() for run in runs]
    results = {
        "wrapped": type(runs[1].model_wrapped._orig_mod).__name__,
        "losses": [toys.Run(run, run.state.log_history).losses for run in runs],
        "same": [all(torch.equal(states[0][name], state[name]) for name in state) for state in states[1:]],
        "bytes": [fraction.compiled_policy.stored_bytes, fraction.compiled_policy.plain_bytes],
        "calls": [plan.calls for plan in fraction.compiled_policy.regions],
        "changes": [[e["step"], e["share"]] for e in peak.history if e["event"] == "change"],
    }
    toys.write_rank_results(folder, results)


def test_compiled_ranks_train_as_without_us_and_change_together(run_two_ranks) -> None:
    ranks = run_two_ranks(__file__)
    for rank in ranks:
        assert rank["wrapped"] == "DistributedDataParallel"
        assert rank["same"] == [True, True]
        stored_bytes, plain = rank["bytes"]
        assert 0 < stored_bytes <= 0.6 * plain
        assert set(rank["calls"]) == {1}
        # After the first measured peak everything fits.
        assert rank["changes"] == [[2, 1.0]]
    plain, fraction, peak = ranks[0]["losses"]
    assert len(plain) == NUM_STEPS
    assert plain == fraction == peak


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
