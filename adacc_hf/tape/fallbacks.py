"""Fallbacks: counts of block calls that did not follow the plan of their block."""

from __future__ import annotations

from collections import Counter


class Fallbacks:
    """Counter of the block calls that did not follow the plan of their block, since the last `clear()`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of calls by the reason for not following the plan."""
        self.blocks: dict[str, list[str]] = {}
        """Names of the blocks, by the reason for not following the plan, in the order of their first such calls."""

    def add(self, reason: str, block: str) -> None:
        """Count one call of `block` that did not follow its plan because of `reason`."""
        self.counts[reason] += 1
        names = self.blocks.setdefault(reason, [])
        if block not in names:
            names.append(block)

    def clear(self) -> None:
        self.counts.clear()
        self.blocks.clear()
