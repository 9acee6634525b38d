"""Replacement of torch's checkpoint, called by Transformers."""

import copy
import unittest
from collections.abc import Iterator
from functools import partial
from unittest import mock

import checkpoint_plugin
import pytest
import torch
from checkpoint_plugin import Record, checkpoint_by_replay
from torch import nn
from transformers import PreTrainedModel, modeling_utils

from adacc_hf.eval.zoo.configs import architectures
from adacc_hf.torch_glue.compat import switch_checkpointing

ZOO = architectures()


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Enable the plugin with a new record."""
    monkeypatch.setattr(checkpoint_plugin, "RECORD", Record())
    checkpoint_plugin.pytest_configure()
    yield checkpoint_plugin.RECORD
    checkpoint_plugin.pytest_unconfigure()


def trained(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the losses and gradients of three steps."""
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return results


@pytest.mark.parametrize(("name", "num_blocks"), [("gpt2", 2), ("llama", 2), ("t5", 4), ("bert", 2)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_that_transformers_enables_is_ours(record, name, num_blocks, use_reentrant):
    model, batch = ZOO[name].build(), ZOO[name].make_batch(0)
    plain = trained(model, batch)
    switch_checkpointing(model, on=True, torch_options={"use_reentrant": use_reentrant})
    ours = trained(copy.deepcopy(model), batch)
    assert all(torch.equal(left, right) for left, right in zip(ours, plain, strict=True))
    assert record.num_calls == 3 * num_blocks
    assert record.num_replayed > 0
    assert record.num_left == record.num_untrusted == 0


def test_a_forward_behind_a_mock_is_found(record: Record) -> None:
    """Transformers' tests wrap the forward in a mock, to count its calls. Dynamo cannot trace it."""
    model, batch = ZOO["gpt2"].build(), ZOO["gpt2"].make_batch(0)
    switch_checkpointing(model, on=True)
    layer, forward_mock = model.transformer.h[0], mock.Mock()
    inner = layer._gradient_checkpointing_func

    def behind_a_mock(forward, *args):
        forward_mock.side_effect = forward
        return inner(forward_mock, *args)

    layer._gradient_checkpointing_func = behind_a_mock
    model(**batch).loss.backward()
    assert forward_mock.call_count == 2
    assert (record.num_calls, record.num_left) == (2, 0)


def test_other_functions_are_left_to_torch(record: Record) -> None:
    weight = torch.ones(3, requires_grad=True)
    checkpoint_by_replay(lambda x: x.sin().sum(), weight, use_reentrant=False).backward()
    assert torch.equal(weight.grad, torch.ones(3).cos())
    assert (record.num_calls, record.num_left) == (0, 1)


def test_without_gradients_nothing_is_recorded(record: Record) -> None:
    with torch.no_grad():
        checkpoint_by_replay(partial(nn.Linear(2, 2).__call__), torch.ones(1, 2))
    assert record.num_calls == 0


def test_data_read_by_a_block_is_reported(record: Record) -> None:
    class Reading(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.max().item()

    block = Reading()
    for _ in range(2):
        checkpoint_by_replay(block.__call__, torch.ones(2, requires_grad=True)).sum().backward()
    assert record.num_untrusted == 2
    assert "reads data" in record.untrusted["Reading"]


def test_torch_is_back_when_pytest_ends() -> None:
    assert modeling_utils.checkpoint is checkpoint_by_replay
    checkpoint_plugin.pytest_unconfigure()
    assert modeling_utils.checkpoint is torch.utils.checkpoint.checkpoint


@pytest.mark.parametrize(("replayed", "passes"), [(0, False), (3, True)])
def test_a_replay_counts_as_a_second_run(record, monkeypatch, replayed, passes):
    case = type("Case", (unittest.TestCase,), {})
    request = mock.Mock(cls=case)
    checkpoint_plugin.replay_is_a_second_run.__wrapped__(request, monkeypatch)
    record.num_replayed += replayed
    check = case().assertGreater
    check(2, 1)
    with pytest.raises(AssertionError):
        check(1, 2)
    if passes:
        check(1, 1)
    else:
        with pytest.raises(AssertionError, match="1 not greater than 1"):
            check(1, 1)
