"""AdaccSession in Accelerate's loops, and with two gloo ranks under DDP. This file is also the script that the ranks
run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from adacc_hf import AdaccSession

HALF = {"memory_budget": 0.5, "actions": ("retain", "recompute"), "head": "plain"}
NUM_STEPS = 8


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def batches_of(samples: int, rank: int = 0) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 50, (NUM_STEPS * 2 * samples, 16), generator=torch.Generator().manual_seed(rank))
    return [{"input_ids": ids, "labels": ids} for ids in tokens.split(samples)]


def by_accelerate(model: Any, precision: str, has_session: bool) -> tuple[list[float], AdaccSession | None]:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(batches_of(4), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model.train(), plain, loader)
    session = AdaccSession(model, optimizer, **HALF) if has_session else None
    losses = []
    for batch in loader:
        if session is None:
            losses.append(accelerated_step(accelerator, model, optimizer, batch))
            continue
        with session.micro_batch(batch):
            losses.append(accelerated_step(accelerator, model, optimizer, batch))
    if session is not None:
        session.close()
    return losses, session


def accelerated_step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> float:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_by_accelerate_trains_as_plainly(make_model, precision):
    plain, adacc_model = make_model(n_layer=3), make_model(n_layer=3)
    losses, _ = by_accelerate(plain, precision, has_session=False)
    adacc_losses, session = by_accelerate(adacc_model, precision, has_session=True)
    assert adacc_losses == losses
    assert all(map(torch.equal, adacc_model.state_dict().values(), plain.state_dict().values()))
    assert session.num_steps == NUM_STEPS
    assert session.state.loop.num_micro == 2
    assert session.policy.action_counts()["recompute"] > 0
    if precision == "bf16":
        assert any(value.dtype == "bfloat16" for kind in session.profile.kinds for value in kind.values)


def by_ddp(toys: Any, has_session: bool) -> tuple[list[float], Any, AdaccSession | None]:
    model = toys.tiny_model().train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    session = AdaccSession(wrapped, optimizer, **HALF) if has_session else None
    losses = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        loss = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for batch in batches_of(4, dist.get_rank()):
        if session is None:
            step(batch)
            continue
        with session.step(batch):
            step(batch)
    if session is not None:
        session.close()
    return losses, model, session


def run_rank(folder: Path) -> None:
    import trainer_builders as toys

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain_losses, plain, _ = by_ddp(toys, has_session=False)
    losses, model, session = by_ddp(toys, has_session=True)
    results = {
        "equal": losses == plain_losses
        and all(map(torch.equal, model.state_dict().values(), plain.state_dict().values())),
        "policy": session.policy.digest,
        "recomputed": session.policy.action_counts()["recompute"],
    }
    toys.write_rank_results(folder, results)


def test_ranks_of_a_loop_follow_one_policy(run_two_ranks) -> None:
    first, second = run_two_ranks(__file__)
    assert first["equal"]
    assert second["equal"]
    assert first["policy"] == second["policy"]
    assert first["recomputed"] > 0


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
