"""The table of a device's memory after an out-of-memory error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from adacc_hf import AdaccConfig, profile_model, solve_policy
from adacc_hf.adapt.memory_table import NUM_LARGEST, OTHER, LiveMemory, memory_table
from adacc_hf.artifacts.policy import Action
from adacc_hf.artifacts.size_model import joined
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.price.resized_profile import resize_profile
from adacc_hf.solve.simple_policies import checkpoint_policy

MIB = 2**20


class Tied(nn.Module):
    """Two layers with one weight of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1024, 1024, bias=False)
        self.two = nn.Linear(1024, 1024, bias=False)
        self.two.weight = self.one.weight


def test_each_storage_counts_once_for_its_purpose() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.two(model.one(torch.randn(1, 1024))).sum().backward()
    optimizer.step()
    activation = torch.zeros(2 * MIB)
    views = [activation[:10], activation.view(2, -1)]
    live = LiveMemory.measure(model, optimizer)
    assert [live.parameter_bytes, live.gradient_bytes, live.optimizer_bytes] == [4 * MIB] * 3
    assert live.other_bytes >= activation.nbytes
    assert live.live_bytes == 12 * MIB + live.other_bytes
    assert live.unused_bytes is None  # a CPU allocator has no reserve to ask for
    found = [(tensor.name, tensor.nbytes) for tensor in live.largest]
    assert len(found) <= NUM_LARGEST
    assert found == sorted(found, key=lambda pair: pair[1], reverse=True)
    for pair in (("one.weight", 4 * MIB), ("gradient of one.weight", 4 * MIB), ("optimizer state", 4 * MIB)):
        assert found.count(pair) == 1
    assert (OTHER, 8 * MIB) in found
    before = live.other_bytes
    del activation, views
    assert LiveMemory.measure(model, optimizer).other_bytes <= before - 8 * MIB


def test_a_tensor_without_storage_is_left_out() -> None:
    model = nn.Linear(4, 4)
    seen: list[int] = []

    def measure(x: torch.Tensor) -> torch.Tensor:
        seen.append(LiveMemory.measure(model, None).parameter_bytes)
        return x

    torch.func.vmap(measure)(torch.ones(3, 4))
    assert seen == [20 * 4]


@pytest.fixture(scope="module")
def profiled() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=64, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    tokens = torch.randint(100, (8, 32))
    settings = AdaccConfig(actions=("retain", "recompute"))
    parts = [tokens[:samples, :length] for samples, length in ((8, 32), (8, 16), (2, 8), (3, 24), (4, 32))]
    return model, joined([profile_model(model, {"input_ids": ids, "labels": ids}, settings) for ids in parts])


@pytest.mark.parametrize("num_samples", [2, 5])
def test_the_table_names_the_largest_batch_whose_recomputation_fits(profiled: Any, num_samples: int) -> None:
    _, profile = profiled
    shapes = tuple((name, (num_samples, 32)) for name, _ in profile.measured[0][0])
    peak = checkpoint_policy(resize_profile(profile, shapes)).predicted_peak_bytes
    policy = solve_policy(profile, 0.5)
    live = LiveMemory(
        device=torch.device("cpu"), parameter_bytes=peak, gradient_bytes=0, optimizer_bytes=0, other_bytes=0,
        unused_bytes=None, largest=(),
    )  # fmt: skip
    assert f": {num_samples} samples of this length or " in memory_table(live, policy, profile)


def test_the_table_has_the_plan_beside_what_is_live(profiled: Any) -> None:
    model, profile = profiled
    policy = solve_policy(profile, 0.6)
    text = memory_table(LiveMemory.measure(model, None), policy, profile)
    assert text.startswith("Adacc: memory of cpu when it ran out:")
    for row in ("parameters and buffers", "planned: peak", "planned: live before the step", "Largest live tensors:"):
        assert row in text
    (kind,) = profile.kinds
    stored = [  # both blocks have one plan or two
        (value.nbytes * names, f"retain  {kind.names[value.index]} of")
        for plan_number, names in Counter(plan for _, plan in policy.blocks).items()
        for value in kind.activations
        if policy.plans[plan_number].choice(value.index).action is Action.RETAIN
    ]
    nbytes, name = max(stored)
    first = text.split("that the plan stores, summed over blocks of one kind:\n")[1].splitlines()[0]
    assert first.strip().startswith(f"{format_bytes(nbytes)}  retain")
    assert sum(nbytes for nbytes, _ in stored) <= policy.predicted_stored_bytes
    assert any(name in line for line in text.splitlines())
