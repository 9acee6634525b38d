"""Reward function for the reinforcement learning scripts of other packages, which import it by name."""

from typing import Any


def characters(completions: list[Any], **_: Any) -> list[float]:
    """Return the number of different characters in each completion."""
    return [float(len(set(str(text)))) for text in completions]
