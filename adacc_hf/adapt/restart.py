"""Restart: search for a batch that is profiled again when a run has to start over."""

from __future__ import annotations

MORE_BLOCKS = "more blocks are trained than before"
OTHER_OPERATORS = "most batches run other operators than the profiled one"
"""Reasons to start over."""
FALLBACK_MODES = {MORE_BLOCKS: "under torch's checkpoint", OTHER_OPERATORS: "with the least memory"}
"""Execution of calls without a plan until the run starts over, keyed by the reason to start over."""
MOST_TRIES = 64
"""Steps after which the search for a batch ends. With several ranks, each of them takes a collective."""


class Restart:
    """A search for the batch with which a run starts over. Its profile replaces the profile of the first batch."""

    def __init__(self) -> None:
        self.why = ""
        """Reason to start over."""
        self.num_tries = 0
        """Steps that remain for the search; 0 if no batch is searched for."""
        self.tried: set[str] = set()
        """Reasons for which a search was begun so far."""

    def want(self, reason: str) -> None:
        """Begin to search for a batch, for this reason."""
        self.why, self.num_tries = reason, MOST_TRIES
        self.tried.add(reason)

    def takes(self, is_complete: bool, has_diverged: bool) -> bool:
        """Return True if the run can start over with the most recent batch, and count the attempt.

        The batch has to be complete, which means that it called every block that any batch has trained so far. If most
        batches run other operators than the profiled one, it has to diverge from the plans too.
        """
        self.num_tries -= 1
        return is_complete and (has_diverged or self.why != OTHER_OPERATORS)
