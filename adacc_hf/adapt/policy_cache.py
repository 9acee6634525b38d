"""PolicyCache: the policies of a run, one for each size of batch.

Sizes are grouped into size classes. Each class is 25 % larger than the class below (artifacts/size_model.py). A class
gets a policy before the first batch of the class runs. The policy is solved for a profile that is extrapolated from a
measured one, once a few sizes were measured. Before, a batch runs under the policy of the smallest profiled size that
the batch fits in, or is recorded while it trains under torch's checkpoint.

Buckets (torch_glue/batch_shapes.py) group the batches that belong to no size class.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.artifacts.size_model import SizeModel, joined
from adacc_hf.run.policy_handle import BlockPlans
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    bucket_of,
    fits_in,
    from_profile_shapes,
    num_elements,
    smallest_enclosing,
    to_profile_shapes,
)

ENOUGH_SEEN = 8
"""Number of batches after which a bucket (group of similar batch sizes) without a policy gets a profile of its own.

A profile takes as long as tens of steps.
"""
FEW_PROFILES, MAX_PROFILES = 6, 12
"""Number of measured profiles up to which each new bucket is profiled at once, because profiles of a few sizes predict
all others, and the number of profiles that are kept."""
MAX_SIZE_POLICIES = 16
"""Maximum number of policies of a run that are adapted to the data, one per batch size. Size classes that occur later
get untracked plans, which are not adapted to the data."""
MAX_UNTRACKED = 64
"""Maximum number of size classes with untracked plans (plans that are not adapted to the data). If there are more, the
least recently used class is dropped."""
MAX_UNPLANNED = 256
"""Maximum number of buckets (groups of similar batch sizes) whose batches are counted. The bucket that occurred least
recently is dropped, because the number of different buckets is unlimited, and ranks exchange these counts."""


class PolicyCache:
    """Policies of a run by batch size. No lookup synchronizes with the device or with other ranks."""

    def __init__(self) -> None:
        self.all: list[SizePolicy] = []
        self.untracked: OrderedDict[BatchShapes, tuple[BlockPlans, Hashable]] = OrderedDict()
        """Untracked plans (plans that are not adapted to the data) by size class (batches of similar sizes), each with
        the settings that it was made for (`RunContext.settings`). A class with a policy in `all` has no untracked
        plans."""
        self.unplanned: OrderedDict[BatchShapes, tuple[BatchShapes, int]] = OrderedDict()
        """Counts for each bucket (group of similar batch sizes) without a policy: (smallest sizes that all batches of
        the bucket fit in, number of batches)."""
        self._refused: set[BatchShapes] = set()
        self._above_budget: OrderedDict[tuple[BatchShapes, Hashable], None] = OrderedDict()
        """Pairs (size class, settings) for which no policy fits the budget. The settings are `RunContext.settings`."""
        self.least: Policy | None = None
        """Policy that needs the least memory, from the most recent solver run at a size at which no policy fits the
        budget."""
        self._profiles: list[Profile] = []
        """Measured profiles of different sizes, the latest last."""

    def add(self, size_policy: SizePolicy) -> None:
        """Add `size_policy`, and remove the policies that it replaces (see `_replaces_size_policy`).

        If the sizes of `size_policy` are unknown (its `shapes` are None), remove all other policies.
        """
        shapes = size_policy.shapes
        if shapes is None:
            self.all = [size_policy]
            return
        self.all = [old for old in self.all if not _replaces_size_policy(size_policy, old)] + [size_policy]
        self.untracked.pop(shapes, None)
        self.unplanned.pop(bucket_of(shapes), None)

    def clear(self) -> None:
        """Remove all policies, because the model now trains other blocks, or its blocks run other operators."""
        self.all.clear()
        self.untracked.clear()
        self._above_budget.clear()
        self.least = None

    def add_untracked(self, sizes: BatchShapes, plans: BlockPlans, settings: Hashable) -> None:
        """Store `plans` for the size class `sizes` as untracked plans, which are not adapted to the data.

        `settings` are the settings that the plans were made for (`RunContext.settings`).
        """
        put_latest(self.untracked, sizes, (plans, settings), MAX_UNTRACKED)

    @property
    def is_full(self) -> bool:
        """True if the run has MAX_SIZE_POLICIES policies. Further size classes then get untracked plans, which are not
        adapted to the data."""
        return len(self.all) >= MAX_SIZE_POLICIES

    @property
    def idle_blocks(self) -> set[str]:
        """Names of the blocks that ran without gradients when profiled, for which policies have no actions."""
        return set().union(*(size_policy.replanner.policy.idle_blocks for size_policy in self.all))

    @property
    def measured(self) -> SizePolicy | None:
        """Latest policy (with its replanner) whose profile can predict the profiles of other batch sizes, or None."""
        candidates = [s for s in self.all if s.shapes is not None and s.replanner.profile.sizes is not None]
        return candidates[-1] if candidates else None

    def size_model(self) -> tuple[SizePolicy, SizeModel]:
        """Return (policy with its replanner, size model) of the latest profile that predicts the profiles of other
        batch sizes.

        Call this only if some profile has a size model (`measured` is not None).
        """
        measured = self.measured
        assert measured is not None
        sizes = measured.replanner.profile.sizes
        assert sizes is not None
        return measured, sizes

    def class_of(self, shapes: BatchShapes) -> BatchShapes | None:
        """Return the size class of a batch of `shapes`, or None if no profile predicts batches of this size."""
        if self.measured is None:
            return None
        size_class = self.size_model()[1].size_class(to_profile_shapes(shapes))
        return None if size_class is None else from_profile_shapes(size_class)

    def at(self, sizes: BatchShapes) -> SizePolicy | None:
        """Return the policy that was made for exactly `sizes`, or None if that size has no policy."""
        return next((size_policy for size_policy in self.all if size_policy.shapes == sizes), None)

    def untracked_plans(self, sizes: BatchShapes, shapes: BatchShapes, settings: Hashable) -> BlockPlans | None:
        """Return the untracked plans (plans that are not adapted to the data) for the size class `sizes`.

        If the class has no untracked plans, return the plans for the smallest sizes of the class in which a batch of
        `shapes` fits, or None. Plans that were made for other settings (`RunContext.settings`) are ignored.
        """
        current = {key: plans for key, (plans, made_for) in self.untracked.items() if made_for == settings}
        return current.get(sizes) or current.get(_smallest_around(shapes, sizes, current) or sizes)

    def within_class(self, sizes: BatchShapes, shapes: BatchShapes) -> SizePolicy | None:
        """Return the policy for a batch of `shapes` in the size class `sizes`, or None.

        If no policy fits the budget at the upper bounds of a class, the class has policies for smaller sizes instead.
        The result is then the policy for the smallest of these sizes that are at least as large as the batch.
        """
        size_policy = self.at(sizes) or self.at(shapes)
        if size_policy is None and any(fits_in(smaller, sizes) for smaller, _ in self._above_budget):
            candidates = [size_policy.shapes for size_policy in self.all if size_policy.shapes is not None]
            size_policy = self.at(_smallest_around(shapes, sizes, candidates) or sizes)
        return size_policy

    def is_above_budget(self, sizes: BatchShapes, settings: Hashable) -> bool:
        """Return True if no policy fits the budget for batches of `sizes`, because none fits for smaller batches.

        `settings` are `RunContext.settings`.
        """
        return any(other == settings and fits_in(smaller, sizes) for smaller, other in self._above_budget)

    def note_above_budget(self, sizes: BatchShapes, settings: Hashable) -> None:
        """Note that no policy fits the budget for batches of `sizes`, under `settings` (`RunContext.settings`)."""
        put_latest(self._above_budget, (sizes, settings), None, MAX_UNTRACKED)

    def around(self, shapes: BatchShapes) -> SizePolicy | None:
        """Return the policy for the smallest profiled size in which a batch of `shapes` fits, or None if the batch is
        larger.

        Call this for a batch that belongs to no size class. If the batch's bucket (group of similar sizes) has no
        policy, also count the batch in `unplanned`, from which `most_wanted` chooses the next size to profile.
        """
        fitting = [s for s in self.all if s.shapes is None or fits_in(shapes, s.shapes)]
        best = min(fitting, key=lambda s: 0 if s.shapes is None else num_elements(s.shapes), default=None)
        bucket = bucket_of(shapes)
        if best is None or (best.shapes is not None and bucket_of(best.shapes) != bucket):
            self._count(bucket, shapes, ENOUGH_SEEN if best is None or len(self._profiles) < FEW_PROFILES else 1)
        return best

    def with_other_sizes(self, profile: Profile) -> Profile:
        """Return `profile` with the measurements of earlier profiles at other sizes, so that it predicts further sizes,
        as soon as there are enough of them."""
        own = profile.measured[0][0]
        self._profiles = [other for other in self._profiles if other.measured[0][0] != own][1 - MAX_PROFILES :]
        self._profiles.append(profile)
        return joined(self._profiles[::-1])

    @property
    def has_wanted(self) -> bool:
        """True if batches of a size without a policy have occurred often enough to profile one."""
        return not self.is_full and any(count >= ENOUGH_SEEN for _, count in self.unplanned.values())

    def wants(self, shapes: BatchShapes) -> bool:
        """Return True if a batch of `shapes` is to be profiled, because its size has no policy."""
        _, count = self.unplanned.get(bucket_of(shapes), (shapes, 0))
        return not self.is_full and count >= ENOUGH_SEEN and self.class_of(shapes) is None

    def refuse(self, shapes: BatchShapes) -> None:
        """Exclude batches of about the size `shapes` (the same bucket) from further requests for a profile.

        These batches keep running under torch's checkpoint, or under the policy of a larger size.
        """
        self._refused.add(bucket_of(shapes))
        self.unplanned.pop(bucket_of(shapes), None)

    def _count(self, bucket: BatchShapes, shapes: BatchShapes, weight: int) -> None:
        if bucket in self._refused:
            return
        before, num_seen = self.unplanned.get(bucket, (shapes, 0))
        count = smallest_enclosing(before, shapes), num_seen + weight
        put_latest(self.unplanned, bucket, count, MAX_UNPLANNED)


def _smallest_around(shapes: BatchShapes, bounds: BatchShapes, candidates: Iterable[BatchShapes]) -> BatchShapes | None:
    """Return the smallest of `candidates` in which a batch of `shapes` fits, and which fits in `bounds`, or None."""
    fitting = (sizes for sizes in candidates if fits_in(shapes, sizes) and fits_in(sizes, bounds))
    return min(fitting, key=num_elements, default=None)


def _replaces_size_policy(new: SizePolicy, old: SizePolicy) -> bool:
    """Return True if the policy `new` replaces `old`.

    Both must be for the same sizes or, if profiled without a size model, for the same bucket (group of similar sizes).
    """
    if old.shapes is None or new.shapes is None:
        return False
    if old.shapes == new.shapes:
        return True
    is_profiled = new.replanner.profile.sizes is None and not new.is_extrapolated
    return is_profiled and bucket_of(old.shapes) == bucket_of(new.shapes)
