"""Two gloo ranks with different data use the same policies. Outliers move, one rank has longer batches, and one rank's
gradients degrade. This file is also the script of the ranks."""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import adacc_hf.adapt.policy_fit as fit_module
from adacc_hf import AdaccCallback
from adacc_hf.solve.simple_policies import uniform_policy

NUM_STEPS = 8
COMPRESS = {
    "actions": ("retain", "compress"),
    "min_compress_bytes": 4096,
    "memory_budget": 0.45,
    "tracking": 1,
    "head": "plain",
}


class MoveOutliers(TrainerCallback):
    """Callback that moves outlier channels, to other channels on each rank, because weights differ between ranks with
    different data.

    The rank's number is added, so that no rank has the most channels at every step.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for block in model.transformer.h:
            block.ln_2.bias.data.zero_()[: (state.global_step + args.process_index) % 4] = 30.0


class NotePolicy(TrainerCallback):
    """Callback that records the plans of each step, with the outlier channels, which `str(policy)` leaves out."""

    def __init__(self, adacc: AdaccCallback) -> None:
        self.adacc = adacc
        self.policies: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        policy = self.adacc.policy
        self.policies.append(repr((policy.plans, policy.blocks, policy.head)))


def longer_batches(toys: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run whose first batches, which are profiled, are longer on rank 1."""
    from run_builders import InOrder, Lengths

    adacc = AdaccCallback(**toys.LOSSLESS)
    trainer = toys.tiny_trainer(folder, [adacc], trainer_class=InOrder, max_steps=22)
    trainer.train_dataset = Lengths([16, 32] * 4 + [32, 32] * 18)
    trainer.train()
    return adacc.history


def degraded_gradients(toys: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run in which only rank 1 has a degraded gradient, and the run's final policy."""
    sharpen = toys.Sharpen(20.0 if os.environ["RANK"] == "1" else 1.0)
    adacc = AdaccCallback(**{**COMPRESS, "memory_budget": 0.9, "tracking": 4})
    model = toys.tiny_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    # Replaces the solver, whose choice depends on measured times.
    with mock.patch.object(fit_module, "solve_policy", lambda profile, *_: uniform_policy(profile, "compress")):
        toys.tiny_trainer(folder, [adacc, sharpen], model=model, max_steps=NUM_STEPS).train()
    return [{k: v for k, v in e.items() if k in ("step", "verdict")} for e in adacc.history] + [str(adacc.policy)]


def run_rank(folder: Path) -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    adacc = AdaccCallback(**COMPRESS)
    policy_recorder = NotePolicy(adacc)
    callbacks = [adacc, policy_recorder, MoveOutliers()]
    toys.tiny_trainer(folder / "run", callbacks, max_steps=NUM_STEPS, per_device_train_batch_size=2).train()
    results = {
        "policies": policy_recorder.policies,
        "history": [{k: v for k, v in e.items() if "_ms" not in k and "measured" not in k} for e in adacc.history],
        "longer": longer_batches(toys, folder / "longer"),
        "degraded": degraded_gradients(toys, folder / "degraded"),
    }
    toys.write_rank_results(folder, results)


def test_ranks_with_different_data_keep_the_same_policy_at_every_step(run_two_ranks) -> None:
    first_rank, second_rank = run_two_ranks(__file__)
    assert first_rank["policies"] == second_rank["policies"]
    # Fallbacks are counted per rank, because batches differ in size.
    shared = [
        [event for event in rank["history"] if event["event"] != "fallback"] for rank in (first_rank, second_rank)
    ]
    assert shared[0] == shared[1]
    changes = [event for event in first_rank["history"] if event["event"] == "change"]
    assert len(changes) >= 3, "outliers move at every step"
    # A policy may come back, as outliers do, but each one differs from its predecessor.
    pairs = enumerate(pairwise(first_rank["policies"]), start=2)
    assert [step for step, (old, new) in pairs if old != new] == [event["step"] for event in changes]
    assert max(max(e["num_outliers"].values()) for e in first_rank["history"] if e["event"] == "tracking") >= 3
    assert first_rank["degraded"] == second_rank["degraded"]
    (guard,) = (event for event in first_rank["degraded"] if "verdict" in event)
    assert guard["step"] == 8
    assert guard["verdict"].startswith("lossy compression is switched off for GPT2Block.attn.c_attn:addmm")
    # Rank 1's first batches are larger than the batch of the first policy, which all ranks share.
    policies, others_policies = (
        [event for event in rank["longer"] if event["event"] == "policy"] for rank in (first_rank, second_rank)
    )
    assert policies == others_policies
    memory_events = [event for event in first_rank["longer"] if event["event"] == "memory"]
    assert [event["step"] for event in policies] == [1, 3, 4], "both ranks record each other's sizes"
    assert memory_events, first_rank["longer"]
    for event in memory_events:
        assert event["measured_peak_bytes"] == pytest.approx(event["peak_bytes"], rel=0.01), first_rank["longer"]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
