"""ProfileRequests: decides during the run which further batches to profile, because of their size or their operators.

Several ranks exchange their data with collectives, and make the same decision.
"""

from __future__ import annotations

from functools import partial

from adacc_hf.adapt.policy_cache import MAX_SIZE_POLICIES
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.artifacts.call_names import block_of_call
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, gather_from_all_ranks, num_ranks

MORE_BLOCKS = "more blocks are trained than before"
OTHER_OPERATORS = "most batches run other operators than the profiled one"
"""Reason for a restart: the model mostly runs operators that were not profiled. In a restart, a batch is profiled
again, and all policies of the run are replaced."""
FALLBACK_MODES = {MORE_BLOCKS: "under torch's checkpoint", OTHER_OPERATORS: "with the least memory"}
"""Texts on how block calls without a plan run until the restart, keyed by the reason for the restart."""
MOST_TRIES = 64
"""Number of steps in which the run waits for a batch from which all policies can be made anew. Each of these steps
takes a collective."""


class ProfileRequests:
    """Requests for profiles during a run: for a batch size without a policy, or for a restart, which replaces all
    policies."""

    def __init__(self, choice: PolicyChoice, installation: Installation) -> None:
        self.is_due = False
        """True if all ranks record a micro-batch of the next step, because a rank has batches without a policy."""
        self.why = ""
        """Reason for the restart (replacement of all policies) for which a batch is awaited."""
        self.num_tries = 0
        """Number of further steps in which the run waits for a batch for a restart. 0 if no restart is planned."""
        self._choice, self._installation = choice, installation
        self._tried: set[str] = set()
        """Reasons for which a restart was tried. They do not lead to another restart until `restarted` removes them."""
        self._is_alone = num_ranks() == 1

    def look(self) -> None:
        """Decide at a step's end, with all ranks, what to record next."""
        if not self._is_alone:
            self._look_for_sizes()
        self._look_for_reasons()

    def _look_for_sizes(self) -> None:
        """Request a profile of a size that cannot be extrapolated, and replace untracked plans of new size classes,
        which only some ranks may have, by policies that all ranks adapt to the data."""
        cache = self._choice.cache
        if cache.is_full:
            return
        self.is_due = any(gather_from_all_ranks(cache.has_wanted))
        classes = sorted(set().union(*gather_from_all_ranks(list(cache.untracked))), key=repr)
        for sizes in classes[: MAX_SIZE_POLICIES - len(cache.all)]:
            profile = self._choice.extrapolated.profile_at(sizes)
            policy = broadcast_from_first_rank(partial(self._choice.extrapolated.solve_or_least, sizes, profile))
            self._choice.add_extrapolated(sizes, profile, policy)

    def _look_for_reasons(self) -> None:
        """If there is a new reason to replace all policies (a restart), begin to wait for a suitable batch."""
        idle, blocks = self._choice.cache.idle_blocks, self._installation.blocks
        reasons = {MORE_BLOCKS: any(blocks[name].num_calls for name in idle)} if idle else {}
        reasons[OTHER_OPERATORS] = self._choice.diverged.most_diverged()
        for why, is_mine in reasons.items():
            if why not in self._tried and any(gather_from_all_ranks(is_mine)):
                self.why, self.num_tries = why, MOST_TRIES
                self._tried.add(why)

    def can_restart(self, called: set[str]) -> bool:
        """Decrement `num_tries`. Return True if a restart, which replaces all policies, can use the recorded
        micro-batch, which has made the block calls `called` on this rank.

        On it, the model must have called every block that it has called with gradients in any step of the run so far.
        """
        self.num_tries -= 1
        blocks = {block_of_call(name) for name in called}
        is_whole = not (self._installation.blocks.keys() - blocks).difference(self._installation.uncalled())
        return all(gather_from_all_ranks(bool(called) and is_whole))

    def restarted(self) -> None:
        """Record that all policies were replaced. If blocks that were not trained so far are trained later, the
        policies may be replaced again."""
        self._tried.discard(MORE_BLOCKS)
