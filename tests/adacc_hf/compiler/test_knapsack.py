"""The planner's knapsack, by itself and inside torch's partitioner."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from adacc_hf.compiler.knapsack import AdaccKnapsack, best_saved

ITEMS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8)


@given(ITEMS, st.integers(0, 80))
def test_nothing_better_fits(items: list[tuple[int, int]], room: int) -> None:
    memory, times = [float(size) for size, _ in items], [float(ms) for _, ms in items]
    saved = best_saved(memory, times, room)
    assert sum(memory[i] for i in saved) <= room
    best = max(
        sum(times[i] for i in subset)
        for count in range(len(items) + 1)
        for subset in combinations(range(len(items)), count)
        if sum(memory[i] for i in subset) <= room
    )
    assert sum(times[i] for i in saved) == pytest.approx(best)


def test_torch_asks_it_and_trains_the_same(train_step: Any) -> None:
    # No dropout, because under a memory budget torch draws random numbers in another order than without.
    plain = train_step(min_cut_rematerialization_partition, dropout=0.0)
    solver = AdaccKnapsack()
    with functorch_config.patch(activation_memory_budget=0.4, activation_memory_budget_solver=solver):
        step = train_step(min_cut_rematerialization_partition, dropout=0.0)
    assert sum(t.nbytes for t in step.saved()) < sum(t.nbytes for t in plain.saved())
    assert all(torch.equal(a, b) for a, b in zip(step.gradients, plain.gradients, strict=True))
