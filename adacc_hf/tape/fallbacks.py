"""Fallbacks: counts of block calls that did not follow their plan."""

from __future__ import annotations

from collections import Counter


class Fallbacks:
    """Block calls that did not follow their plan, since the last `clear`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of calls by reason."""
        self.blocks: dict[str, list[str]] = {}
        """Names of the blocks by reason, in the order of the blocks' first fallback calls."""

    def add(self, reason: str, block: str) -> None:
        """Count one call of `block` that did not follow its plan because of `reason`."""
        self.counts[reason] += 1
        names = self.blocks.setdefault(reason, [])
        if block not in names:
            names.append(block)

    def clear(self) -> None:
        self.counts.clear()
        self.blocks.clear()
