"""TrainingLoop: the facts about a user's own loop, and the autocast around its forwards."""

from types import SimpleNamespace

import pytest
import torch

from adacc_hf.adapt.session import SessionAdapter
from adacc_hf.adapt.training_loop import TrainingLoop


@pytest.mark.parametrize(("device", "num_batches"), [("cpu", 1), ("cuda", 0)])
def test_a_cpu_has_one_batch_before_a_step_and_none_ahead(device, num_batches):
    loop = TrainingLoop()
    assert loop.num_before_step(torch.device(device)) == num_batches
    assert loop.num_prefetched(torch.device(device)) == 0


def test_an_adapter_is_shown_with_its_settings_and_its_policy():
    adapter = SessionAdapter(None, None, {"memory_budget": 0.5, "head": "plain"})
    assert repr(adapter) == "SessionAdapter(memory_budget=0.5, head='plain')"

    class WithPolicy(SessionAdapter):
        policy = SimpleNamespace(describe=lambda: "4 blocks")

    assert repr(WithPolicy(adapter.config, None, {})) == "<WithPolicy(memory_budget=0.5, head='plain'): 4 blocks>"
    assert repr(SessionAdapter(None, None, {})) == "SessionAdapter()"
