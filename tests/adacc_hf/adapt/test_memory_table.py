"""The table of a device's memory after an out-of-memory error."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from adacc_hf import AdaccConfig, profile_model, solve_policy
from adacc_hf.adapt.memory_table import NUM_LARGEST, OTHER, OTHERS, memory_table
from adacc_hf.artifacts.units import parse_bytes

MIB = 2**20


class Tied(nn.Module):
    """Two layers with one weight of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1024, 1024, bias=False)
        self.two = nn.Linear(1024, 1024, bias=False)
        self.two.weight = self.one.weight


def rows_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, int], list[str]]:
    """Return the rows of the table without a policy, in bytes by name, and the lines of the largest tensors."""
    title, *lines = memory_table(model, optimizer, None, None).splitlines()
    assert title == "Adacc: memory of cpu when it ran out:"
    end = lines.index("Largest live tensors:")
    rows = {line[:42].strip(): parse_bytes(line[42:].replace(" ", ""), "table") for line in lines[:end]}
    return rows, [line.strip() for line in lines[end + 1 :]]


def test_each_storage_counts_once_for_its_purpose() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.two(model.one(torch.randn(1, 1024))).sum().backward()
    optimizer.step()
    activation = torch.zeros(2 * MIB)
    views = [activation[:10], activation.view(2, -1)]
    rows, largest = rows_of(model, optimizer)
    assert [rows[name] for name in ("parameters and buffers", "gradients", "optimizer state")] == [4 * MIB] * 3
    assert rows[OTHERS] >= activation.nbytes
    assert abs(rows["live in all"] - 12 * MIB - rows[OTHERS]) < MIB // 50
    assert len(largest) <= NUM_LARGEST
    for name in ("one.weight", "gradient of one.weight", "optimizer state"):
        assert largest.count(f"4.00 MiB  float32 1024x1024  {name}") == 1
    assert any(line.startswith("8.00 MiB") and line.endswith(OTHER) for line in largest)
    before = rows[OTHERS]
    del activation, views
    assert rows_of(model, optimizer)[0][OTHERS] < before - 7 * MIB


def test_a_tensor_without_storage_is_left_out() -> None:
    model = nn.Linear(4, 4)
    seen: list[int] = []

    def measure(x: torch.Tensor) -> torch.Tensor:
        seen.append(rows_of(model, None)[0]["parameters and buffers"])
        return x

    torch.func.vmap(measure)(torch.ones(3, 4))
    assert seen == [20 * 4]


def test_the_table_has_the_plan_beside_what_is_live() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=64, use_cache=False)
    model, tokens = GPT2LMHeadModel(config).train(), torch.randint(100, (8, 32))
    profile = profile_model(model, {"input_ids": tokens, "labels": tokens}, AdaccConfig(exact=True))
    text = memory_table(model, None, solve_policy(profile, 0.6), profile)
    assert text.startswith("Adacc: memory of cpu when it ran out:")
    for row in ("parameters and buffers", "planned: peak", "planned: live before the step", "Largest live tensors:"):
        assert row in text
