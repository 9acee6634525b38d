"""Retry of a micro-batch after an out-of-memory error: the first try's effects are undone, the budget is tighter. Table
of the device's memory."""

from __future__ import annotations

import random
import re

import numpy
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, solve_policy
from adacc_hf.adapt.oom_retry import NUM_LARGEST, OTHER, OTHERS, memory_table, run_with_retry, tighter_budget
from adacc_hf.artifacts.config import Budget
from adacc_hf.artifacts.units import parse_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Failing:
    """Micro-batch that draws random numbers from all generators, and runs out of memory the first `num_fails` times."""

    def __init__(self, device, num_fails=1, message="no room", error=torch.OutOfMemoryError):
        self.device, self.num_fails, self.message, self.draws, self.error = device, num_fails, message, [], error

    def __call__(self):
        self.draws.append(
            [
                random.random(),
                numpy.random.rand(),
                *(torch.rand(1, device=generator_device).item() for generator_device in ("cpu", self.device)),
            ]
        )
        if len(self.draws) <= self.num_fails:
            raise self.error(self.message)
        return "done"


def retry(run, tighten=lambda: None, advice=lambda: "Take less"):
    return run_with_retry(run, torch.nn.Linear(2, 2).to(run.device), tighten, advice, report=lambda: "the table")


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_try_draws_what_the_first_drew(device):
    def tighten():
        torch.rand(3, device=device)

    run = Failing(device)
    assert retry(run, tighten) == "done"
    first, second = run.draws
    assert first == second


@pytest.mark.parametrize(
    ("message", "is_tried_again"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
            True,
        ),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("The size of tensor a (2) must match the size of tensor b (3)", False),
    ],
)
def test_libraries_run_out_of_memory_in_their_own_words(message, is_tried_again):
    run = Failing("cpu", message=message, error=RuntimeError)
    if is_tried_again:
        assert retry(run) == "done"
    else:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            retry(run)
    assert len(run.draws) == 1 + is_tried_again


def test_what_a_broken_backward_left_is_taken_away_before_the_next_try():
    model = torch.nn.Linear(2, 1)
    earlier = model.weight.grad = torch.ones(1, 2)
    tries = []

    def run():
        tries.append((model.weight.grad is earlier, model.bias.grad))
        if len(tries) == 1:
            model.weight.grad, model.bias.grad = torch.zeros(1, 2), torch.zeros(1)
            raise torch.OutOfMemoryError("no room")

    run_with_retry(run, model, lambda: None, lambda: "", lambda: "")
    assert tries == [(True, None), (True, None)]


@pytest.mark.parametrize("form", ["auto", "bytes", "fraction"])
def test_a_policy_that_ran_out_of_memory_may_have_nine_tenths_of_what_it_kept_to(gpt2_like_profile, form):
    profile = gpt2_like_profile(num_blocks=4)
    peak = solve_policy(profile, 0.6).predicted_peak_bytes
    budget = {"auto": "auto", "bytes": peak, "fraction": 0.6}[form]
    config = AdaccConfig(memory_budget=budget)
    policy = solve_policy(profile, budget, config)
    tighter = tighter_budget(policy, profile, Budget.resolve(budget, profile, config))
    if form == "fraction":
        stored_share = policy.predicted_stored_bytes / profile.plain_stored_bytes
        assert tighter == pytest.approx(0.9 * stored_share, abs=1e-6)  # rounded down to a millionth
    else:
        assert tighter == int(0.9 * policy.predicted_peak_bytes)


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
