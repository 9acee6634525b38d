"""The cost of a new sequence length, from a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from adacc_hf.eval.new_length import NUM_LENGTHS, NUM_STEADY_STEPS, new_length_figures


@pytest.mark.parametrize(("checkpointing_ms", "steps"), [(12.0, 25), (10.5, 100), (10.0, None), (9.0, None)])
def test_extra_time_is_made_up_for_by_quicker_steps(checkpointing_ms: float, steps: int | None) -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    contender = SimpleNamespace(batch={"input_ids": ids, "labels": ids})
    lengths: list[int] = []

    def step_ms() -> float:
        length = contender.batch["labels"].shape[1]
        lengths.append(length)
        return {1: 40.0, 2: 30.0}.get(lengths.count(length), 10.0)

    figures = new_length_figures(contender, checkpointing_ms, step_ms)
    assert (figures["first_ms"], figures["second_ms"], figures["steady_ms"]) == (40.0, 30.0, 10.0)
    assert figures["extra_ms"] == 50.0
    assert figures["amortised_after"] == steps
    assert lengths == [length for length in range(11, 16) for _ in range(2 + NUM_STEADY_STEPS)]
    assert len(set(lengths)) == NUM_LENGTHS
    assert contender.batch["input_ids"] is ids
