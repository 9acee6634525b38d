"""Falling budgets of compiled graphs, of which none may end with a higher peak than a larger one."""

from __future__ import annotations

import logging

from adacc_hf.artifacts.policy import Choice
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.compiler import CompiledPolicy
from adacc_hf.compiler.backend import InstalledPartitioner

log = logging.getLogger(__name__)


class LowestPeak:
    """Looks at the code of each share that `installed` compiles for, and goes back to that of a larger one that peaks
    lower."""

    def __init__(self, installed: InstalledPartitioner) -> None:
        self.installed = installed
        self._seen: list[CompiledPolicy] = []
        """The policies whose code was looked at."""

    def look_at_code(self) -> None:
        """After a step whose calls were counted."""
        self.installed.look_at_code()
        policy = self.installed.partitioner.policy
        if not self._seen or self._seen[-1] is not policy:
            self._seen.append(policy)

    def keep_lowest(self) -> bool:
        """Go back to the code with the lowest peak of all for this share or larger ones, if this code has no lower one.

        How Inductor orders and fuses what a plan leaves to it is known from its code only, and can cost more than the
        plan saves. What was made for a larger share takes less time, too. True if all must be compiled again for that.
        """
        policy = self.installed.partitioner.policy
        larger = [seen for seen in self._seen if _share(seen) >= _share(policy)]
        others = [(seen.code_bytes, seen) for seen in larger if seen.code_bytes is not None]
        if policy.code_bytes is None or not others:
            return False
        lowest_bytes, lowest = min(others, key=lambda other: other[0])
        if lowest_bytes > policy.code_bytes or _stored(lowest) == _stored(policy):
            return False
        log.info(
            "Adacc: the code for a share of %.3f would have up to %s live in a step, and that for %.3f only %s: the "
            "latter is taken",
            _share(policy),
            format_bytes(policy.code_bytes),
            _share(lowest),
            format_bytes(lowest_bytes),
        )
        self.installed.partitioner.start_over(lowest.share, lowest.regions)
        self.installed.compile_again()
        return True


def _share(policy: CompiledPolicy) -> float:
    """The fraction that regions were allowed; 0 for the least possible."""
    return 0.0 if policy.share is None else policy.share


def _stored(policy: CompiledPolicy) -> list[tuple[tuple[str, Choice], ...]]:
    return [plan.stored for plan in policy.regions]
