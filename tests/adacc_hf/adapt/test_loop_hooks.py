"""AdaccSession in Accelerate's loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
