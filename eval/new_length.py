"""What a sequence length that was not seen before costs: its first two calls are recorded, which takes longer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from adacc_hf.eval.trials.contenders import Contender

NUM_LENGTHS = 5
"""New lengths that are tried; the median stands."""

NUM_STEADY_STEPS = 3
"""Steps after the recorded ones that give the price of a steady step, the median of them."""


def new_length_figures(contender: Contender, checkpointing_ms: float, step_ms: Callable[[], float]) -> dict[str, Any]:
    """The time of the first and the second step at a new length against a steady one, in milliseconds.

    `extra_ms` is what both take more, and `amortised_after` the number of steps at one length after which this is made
    up for by steady steps that are quicker than `checkpointing_ms`; None if they are not. The lengths are a few tokens
    shorter than the batch. `step_ms()` runs and times one step of the contender.
    """
    whole = contender.batch
    tokens = whole["input_ids"].shape[1]
    samples = []
    try:
        for length in range(tokens - NUM_LENGTHS, tokens):
            contender.batch = {name: tensor[:, :length].contiguous() for name, tensor in whole.items()}
            first, second = step_ms(), step_ms()
            samples.append((first, second, statistics.median(step_ms() for _ in range(NUM_STEADY_STEPS))))
    finally:
        contender.batch = whole
    first, second, steady = (statistics.median(column) for column in zip(*samples, strict=True))
    extra = max(0.0, first - steady) + max(0.0, second - steady)
    saved = checkpointing_ms - steady
    return {
        "first_ms": first,
        "second_ms": second,
        "steady_ms": steady,
        "extra_ms": extra,
        "amortised_after": math.ceil(extra / saved) if saved > 0 else None,
    }
