"""The largest batch that fits, in few trials: each costs whole training steps in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_GUESSES = 4
"""From then on it is doubling and bisection alone, whose number of trials is bounded."""


@dataclass(frozen=True)
class Tried:
    """What one batch took. Bytes are None where the device refused before they could be counted."""

    batch: int
    fits: bool
    static_bytes: int | None = None
    peak_bytes: int | None = None


def largest(trial: Callable[[int], Tried], limit_bytes: int, most: int, first: int = 1) -> int:
    """The largest number from 1 to `most` that fits, 0 if none does, where all below a fitting one fit.

    A step's bytes grow nearly in proportion to its batch, so the next trial is where they would reach the limit. Where
    they do not, because a policy uses up whatever it is given, it goes up by 1, 2, 4, ... and then bisects.
    """
    good, bad, step, guesses = 0, most + 1, 1, 0
    probe = min(first, most)
    while True:
        tried = trial(probe)
        good, bad = (probe, bad) if tried.fits else (good, probe)
        if bad - good == 1:
            return good
        guess = _batch_at(limit_bytes, tried)
        if guess is not None and good < guess < bad and guesses < MAX_GUESSES:
            probe, guesses = guess, guesses + 1
        elif bad > most or guess == good:
            probe, step = min(good + step, bad - 1), 2 * step
        else:
            probe = (good + bad) // 2


def _batch_at(limit_bytes: int, tried: Tried) -> int | None:
    """The batch at which bytes in proportion to those of `tried` reach the limit."""
    if tried.static_bytes is None or tried.peak_bytes is None or tried.peak_bytes <= tried.static_bytes:
        return None
    return tried.batch * (limit_bytes - tried.static_bytes) // (tried.peak_bytes - tried.static_bytes)
