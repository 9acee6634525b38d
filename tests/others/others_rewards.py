"""What the reinforcement learning of others' scripts rewards; they import it by name."""

from __future__ import annotations

from typing import Any


def characters(completions: list[Any], **_: Any) -> list[float]:
    """How many different characters there are."""
    return [float(len(set(str(text)))) for text in completions]
