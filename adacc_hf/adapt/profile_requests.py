"""ProfileRequests: batches that a run wants to profile after its first: of an unknown size, or to restart with.

With several ranks these decisions are collective.
"""

from __future__ import annotations

from functools import partial

from adacc_hf.adapt.policy_cache import MAX_SIZE_POLICIES, most_wanted
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.restart import MORE_BLOCKS, OTHER_OPERATORS, Restart
from adacc_hf.run.blocks import Installation
from adacc_hf.torch_glue.batch_shapes import BatchShapes
from adacc_hf.torch_glue.distributed import broadcast_from_first_rank, gather_from_all_ranks, num_ranks

LOOK_STEPS = 16
"""Steps between two looks for sizes without a policy. With several ranks each look is a collective."""


class ProfileRequests:
    """Sizes and batches that a run wants to profile."""

    def __init__(self, choice: PolicyChoice, installation: Installation) -> None:
        self.sizes: BatchShapes | None = None
        """Sizes to be profiled with the next step's batch; None if no profile is wanted."""
        self.restart = Restart()
        self._choice, self._installation = choice, installation
        self._is_alone = num_ranks() == 1

    @property
    def wants_batch(self) -> bool:
        """True if the next step's batch has to be kept."""
        return self.sizes is not None or self.restart.num_tries > 0

    def take_sizes(self) -> BatchShapes | None:
        """Return the sizes to be profiled, and forget them."""
        sizes, self.sizes = self.sizes, None
        return sizes

    @property
    def idle_blocks(self) -> set[str]:
        """Blocks that no policy decides on, since the profiled batches ran them without gradients."""
        return set().union(*(size_policy.replanner.policy.idle_blocks for size_policy in self._choice.cache.all))

    def end_step(self, num_steps: int) -> None:
        """Decide at a step's end what to profile next. `num_steps` have ended since the policy was set."""
        is_turn = num_steps % LOOK_STEPS == 0
        if is_turn or self._is_alone:
            self._look_for_sizes()
        if is_turn:
            self._look_for_reasons()

    def _look_for_sizes(self) -> None:
        """Request a profile of sizes that cannot be extrapolated. With several ranks, add policies of classes too."""
        cache = self._choice.cache
        if cache.is_full:
            return
        if self._is_alone:
            self.sizes = most_wanted([cache.unplanned()]) if cache.unplanned_buckets else None
            return
        self.sizes = most_wanted(gather_from_all_ranks(cache.unplanned()))
        classes = sorted(set().union(*gather_from_all_ranks(list(cache.untracked))), key=repr)
        for sizes in classes[: MAX_SIZE_POLICIES - len(cache.all)]:
            profile = self._choice.extrapolated.profile_at(sizes)
            policy = broadcast_from_first_rank(partial(self._choice.extrapolated.solve_or_least, sizes, profile))
            self._choice.add_extrapolated(sizes, profile, policy)

    def _look_for_reasons(self) -> None:
        """Request a batch to restart with, once for each reason."""
        idle, blocks = self.idle_blocks, self._installation.blocks
        reasons = {MORE_BLOCKS: any(blocks[name].num_calls for name in idle)} if idle else {}
        reasons[OTHER_OPERATORS] = self._choice.diverged.most_diverged()
        for why, is_mine in reasons.items():
            if why not in self.restart.tried and any(gather_from_all_ranks(is_mine)):
                self.restart.want(why)

    def can_restart(self) -> bool:
        """Return True if the run can start over with the most recent batch of every rank. Count the attempt.

        The batch must have called all blocks that any batch has trained, with the operators that most batches run.
        """
        installation = self._installation
        is_whole = not set(installation.skipped_blocks()).difference(installation.uncalled())
        return all(gather_from_all_ranks(self.restart.takes(is_whole, self._choice.diverged.has_diverged)))
