"""Restart: the search for another batch to profile, with which a run starts over."""

from __future__ import annotations

MORE_BLOCKS = "more blocks are trained than before"
OTHER_OPERATORS = "most batches run other operators than the profiled one"
"""Reasons to start over."""
LEFT_AS = {MORE_BLOCKS: "under torch's checkpoint", OTHER_OPERATORS: "with the least memory"}
"""How calls without a plan run as long as the run does not start over, by the reason to do so."""
MOST_TRIES = 64
"""Steps after which the search for a batch ends. With several ranks, each of them takes a collective."""


class Restart:
    """A search for the batch with which a run starts over: a new profile, in place of the first batch's."""

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
        """Return True if the run can start over with the last batch, and count the try.

        The batch has to be complete, which means that it called every block that any batch has trained so far. If most
        batches run other operators than the profiled one, it has to diverge from the plans too.
        """
        self.num_tries -= 1
        return is_complete and (has_diverged or self.why != OTHER_OPERATORS)
