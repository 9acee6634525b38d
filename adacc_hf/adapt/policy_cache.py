"""PolicyCache: the policies of a run by the size of the batch.

Sizes are grouped into classes, a quarter apart (artifacts/size_model.py). Each class gets a policy before its first
batch runs, for a profile that is extrapolated from a measured one. If the model takes no parts of a batch, sizes cannot
be extrapolated: a batch then runs under the policy of the smallest profiled size that it fits in, or under torch's
checkpoint if it fits in none, until batches of its size were seen often enough to be profiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.artifacts.files import put_latest
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.size_model import SizeModel
from adacc_hf.run.policy_handle import BlockPlans
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    fits_in,
    from_profile_shapes,
    num_elements,
    size_class_of,
    smallest_enclosing,
    to_profile_shapes,
)

ENOUGH_SEEN = 8
"""Batches of a bucket without a policy that make a profile worth its time of 20 to 60 steps."""
MAX_SIZE_POLICIES = 16
"""Size policies of a run, which follow the data. Later classes get plans that stay as they are."""
MAX_UNTRACKED = 64
"""Classes with such plans. The least recently used one is dropped."""
MAX_UNPLANNED = 256
"""Counted buckets without a policy. The one unseen for longest is dropped: batches of any tensors may have a bucket of
their own each, and ranks exchange these counts."""


@dataclass(slots=True)
class _Unplanned:
    """Bucket some of whose batches have no policy of their own."""

    shapes: BatchShapes
    num_seen: int = 0


class PolicyCache:
    """Size policies of a run. No lookup synchronizes with the device or with other ranks."""

    def __init__(self) -> None:
        self.all: list[SizePolicy] = []
        self.untracked: OrderedDict[BatchShapes, BlockPlans] = OrderedDict()
        """Plans by size class, for classes without a size policy."""
        self.counted: OrderedDict[BatchShapes, _Unplanned] = OrderedDict()
        """Buckets some of whose batches have no policy of their own."""
        self._refused: set[BatchShapes] = set()
        self.above_budget: OrderedDict[Hashable, None] = OrderedDict()
        """Keys (class, budget, switched-off codecs) for which no policy keeps to the budget."""
        self.least: Policy | None = None
        """Policy of least memory that was found last for a size at which no policy keeps to the budget."""
        self.may_measure = True
        """True unless a profile has shown that the model takes no parts of a batch."""

    def add(self, size_policy: SizePolicy) -> None:
        """Add `size_policy` in the place of those of the same sizes, or of smaller profiled sizes of its bucket."""
        shapes = size_policy.shapes
        if shapes is None:
            self.all = [size_policy]
            return
        self.all = [old for old in self.all if not _replaces(size_policy, old)] + [size_policy]
        self.untracked.pop(shapes, None)
        self.counted.pop(size_class_of(shapes), None)

    def add_untracked(self, sizes: BatchShapes, plans: BlockPlans) -> None:
        """Remember `plans` for the class `sizes`, which gets no size policy."""
        put_latest(self.untracked, sizes, plans, MAX_UNTRACKED)

    @property
    def is_full(self) -> bool:
        """True if further classes get no size policies."""
        return len(self.all) >= MAX_SIZE_POLICIES

    @property
    def measured(self) -> SizePolicy | None:
        """Latest size policy whose profile predicts other sizes."""
        candidates = [s for s in self.all if s.shapes is not None and s.replanner.profile.sizes is not None]
        return candidates[-1] if candidates else None

    def size_model(self) -> tuple[SizePolicy, SizeModel]:
        """Return `measured` and its profile's size model. There is one wherever a size class exists."""
        measured = self.measured
        assert measured is not None
        sizes = measured.replanner.profile.sizes
        assert sizes is not None
        return measured, sizes

    def class_of(self, shapes: BatchShapes) -> BatchShapes | None:
        """Return the size class of a batch; None if no profile predicts it."""
        if self.measured is None:
            return None
        size_class = self.size_model()[1].size_class(to_profile_shapes(shapes))
        return None if size_class is None else from_profile_shapes(size_class)

    def at(self, sizes: BatchShapes) -> SizePolicy | None:
        """Return the size policy of a class; None if there is none."""
        return next((size_policy for size_policy in self.all if size_policy.shapes == sizes), None)

    def untracked_plans(self, sizes: BatchShapes, shapes: BatchShapes) -> BlockPlans | None:
        """Return the plans of the class `sizes`, or of the very `shapes` of a batch, that have no size policy."""
        return self.untracked.get(sizes) or self.untracked.get(shapes)

    def around(self, shapes: BatchShapes) -> SizePolicy | None:
        """Return the size policy of the smallest profiled size that a batch of `shapes`, in no class, fits in.

        None if it fits in none. Count the batch if its bucket has no policy of its own.
        """
        fitting = [s for s in self.all if s.shapes is None or fits_in(shapes, s.shapes)]
        best = min(fitting, key=lambda s: 0 if s.shapes is None else num_elements(s.shapes), default=None)
        bucket = size_class_of(shapes)
        if best is None or (best.shapes is not None and size_class_of(best.shapes) != bucket):
            self._count(bucket, shapes, ENOUGH_SEEN if best is None and self.may_measure else 1)
        return best

    def refuse(self, shapes: BatchShapes) -> None:
        """Give the bucket of `shapes` no policy: it keeps torch's checkpoint, or the policy of a larger size."""
        self._refused.add(size_class_of(shapes))
        self.counted.pop(size_class_of(shapes), None)

    def _count(self, bucket: BatchShapes, shapes: BatchShapes, weight: int) -> None:
        if bucket in self._refused:
            return
        unplanned = self.counted.get(bucket) or _Unplanned(shapes)
        put_latest(self.counted, bucket, unplanned, MAX_UNPLANNED)
        unplanned.shapes = smallest_enclosing(unplanned.shapes, shapes)
        unplanned.num_seen += weight

    def unplanned(self) -> dict[BatchShapes, tuple[BatchShapes, int]]:
        """Return (sizes, number of batches) by bucket without a policy of its own."""
        return {bucket: (unplanned.shapes, unplanned.num_seen) for bucket, unplanned in self.counted.items()}


def _replaces(new: SizePolicy, old: SizePolicy) -> bool:
    """Return True if `new` makes `old` superfluous."""
    if old.shapes is None or new.shapes is None:
        return False
    if old.shapes == new.shapes:
        return True
    is_profiled = new.replanner.profile.sizes is None and not new.is_extrapolated
    return is_profiled and size_class_of(old.shapes) == size_class_of(new.shapes)


def most_wanted(counts: list[dict[BatchShapes, tuple[BatchShapes, int]]]) -> BatchShapes | None:
    """Return the sizes most worth a profile by the counts of all ranks; None if no bucket was seen often enough."""
    total: dict[BatchShapes, tuple[BatchShapes, int]] = {}
    for rank in counts:
        for bucket, (shapes, count) in rank.items():
            before, counted = total.get(bucket, (shapes, 0))
            total[bucket] = smallest_enclosing(before, shapes), counted + count
    candidates = [(count, num_elements(shapes), shapes) for shapes, count in total.values() if count >= ENOUGH_SEEN]
    return max(candidates, key=lambda item: item[:2])[2] if candidates else None
