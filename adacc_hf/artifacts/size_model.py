"""Model of the byte counts and tensor sizes in a profile as functions of the batch's sizes, fitted to a few batches.

A run profiles the first sizes that occur. For each number of a profile, a sum of products of sizes gives the value at
other sizes (`polynomials.py`). The time of an operator scales with the bytes that it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from adacc_hf.artifacts.polynomials import Approximation, Basis, Polynomial, independent_sizes

if TYPE_CHECKING:
    from adacc_hf.artifacts.kind_profile import KindProfile, Operator
    from adacc_hf.artifacts.profile import Profile

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and size of each tensor of a batch."""

SIZE_CLASS_RATIO = 1.25
"""Ratio of the sizes of neighbouring size classes. With a smaller ratio, policies use more of the budget, but a run
needs more policies."""

MAX_TERMS_OF_NUMBER = 4
"""Maximum number of products of sizes in the sum that gives a number of a profile exactly."""

MAX_EXACT_SIZE = 16
"""Sizes up to this number are not rounded. Each of these sizes is a separate size class."""


def size_dependent_numbers(profile: Profile) -> list[int]:
    """Return all byte counts and tensor sizes in `profile` that depend on the batch's sizes, in a fixed order.

    Payload sizes of codecs are left out, because they follow from the shapes.
    """
    numbers: list[int] = []

    def append_number(number: int) -> int:
        numbers.append(number)
        return number

    _map_numbers(profile, append_number)
    return numbers


def profile_structure(profile: Profile) -> Any:
    """Return the parts of `profile` that do not depend on the batch's sizes: values, operators, and order of events.

    Only profiles of equal structure can be fitted together.
    """
    kinds = [
        (
            [
                (v.name, v.dtype, len(v.shape), v.producer, v.saved, v.activation, v.shared, v.equal_to)
                for v in kind.values
            ],
            [(op.name, op.inputs, op.outputs) for op in kind.operators],
            kind.slots,
            [(event.value, event.death, event.tiled) for event in kind.forward],
            [(event.slot, event.release, event.tiled) for event in kind.backward],
            kind.held,
            kind.untrusted,
        )
        for kind in profile.kinds
    ]
    blocks = [(block.name, block.kind) for block in profile.blocks]
    heads = [head.name for head in profile.other_heads]
    return kinds, blocks, [shared.name for shared in profile.shared], profile.head, heads


class SizeModel:
    """Prediction of one model's profile at other sizes of a batch.

    `measured` is `Profile.measured`, a list of (shapes, numbers). The first item is for the profiled batch, the others
    for batches of other sizes. The numbers are the byte counts and tensor sizes in the profile of a batch of these
    shapes (`size_dependent_numbers`).
    """

    def __init__(self, measured: Sequence[tuple[Shapes, Sequence[int]]]) -> None:
        self._shapes = measured[0][0]
        calls = [_batch_dimensions(shapes) for shapes, _ in measured]
        self._reference = calls[0]
        self._symbols = independent_sizes(calls) or ()
        self._basis = Basis([tuple(call[p] for p in self._symbols) for call in calls])
        self._dimension_rules = [self._basis.fit(column) for column in zip(*calls, strict=True)]
        self._num_elements = [_num_batch_elements(shapes) for shapes, _ in measured]
        columns = list(zip(*(numbers for _, numbers in measured), strict=True))
        sums: dict[tuple[int, ...], Polynomial | Approximation] = {}
        for column in dict.fromkeys(columns):
            exact = self._basis.fit(column, MAX_TERMS_OF_NUMBER)
            sums[column] = self._basis.approximate(column) if exact is None else exact
        self._sums = [sums[column] for column in columns]
        """The sum of products of sizes that gives each number of a profile."""

    @property
    def uncertainty(self) -> float:
        """Largest relative amount by which a measured peak may exceed the predicted peak.

        The largest measured excess is 1.8 %, for T5. T5's sizes are the number of samples and two lengths, which give
        more terms than the measured batches can separate. For models with one sequence per sample it was 1.0 %.
        """
        return 0.04 if len(self._symbols) > 2 else 0.01

    @property
    def max_measured_elements(self) -> int:
        """Number of elements of the largest batch whose memory was measured."""
        return max(self._num_elements)

    def size_class(self, shapes: Shapes) -> Shapes | None:
        """Return the size class of a batch of `shapes`, as the shapes of the largest batch in this class.

        Neighbouring classes differ by SIZE_CLASS_RATIO. Return None if the batch lacks a tensor of the measured
        batches, or if the batch's sizes are not related to each other as in the measured batches.
        """
        ranks = {name: len(size) for name, size in self._shapes}
        shapes = tuple((name, size) for name, size in shapes if name in ranks)  # the Trainer's batch may have more
        if {name: len(size) for name, size in shapes} != ranks:
            return None
        dimensions = _batch_dimensions(shapes)
        products = self._basis.products(tuple(_round_size(dimensions[p], self._reference[p]) for p in self._symbols))
        rounded = [polynomial(products) if polynomial else None for polynomial in self._dimension_rules]
        if any(size is None or size < lower for size, lower in zip(rounded, dimensions, strict=True)):
            return None
        sizes = (size for size in rounded if size is not None)
        return tuple((name, tuple(next(sizes) for _ in size)) for name, size in shapes)

    def profile_at(self, profile: Profile, shapes: Shapes) -> Profile:
        """Return `profile` as predicted for batches of `shapes`.

        `profile` is the measured profile, or a copy of the measured profile with other times and codecs. The profile's
        head must be the measured head. `shapes` must be shapes for which `size_class` is not None. The codecs are not
        changed. To select codecs for the shapes, use `codec_selection.resize_profile`.
        """
        if shapes == self._shapes:
            return profile
        dimensions = _batch_dimensions(shapes)
        products = self._basis.products(tuple(dimensions[p] for p in self._symbols))
        reference = self._basis.products(tuple(self._reference[p] for p in self._symbols))
        sums = iter(self._sums)

        def scale(number: int) -> int:
            own_sum = next(sums)
            return number + own_sum.ceil(products) - own_sum.ceil(reference)

        ratio = _num_batch_elements(shapes) / self._num_elements[0]
        return replace(_with_times(profile, _map_numbers(profile, scale), ratio), measured=())


def joined(profiles: Sequence[Profile]) -> Profile:
    """Return the first of `profiles`, measured at different sizes, with the measurements of all that have its
    structure, so that it predicts further sizes.

    Three profiles are needed for one independent size, and two more for each further one. Return the first profile
    itself if there are fewer.
    """
    first = profiles[0]
    structure, names = profile_structure(first), [name for name, _ in first.measured[0][0]]
    same = [
        profile
        for profile in profiles
        if [name for name, _ in profile.measured[0][0]] == names and profile_structure(profile) == structure
    ]
    measured = tuple((profile.measured[0][0], tuple(size_dependent_numbers(profile))) for profile in same)
    symbols = independent_sizes([_batch_dimensions(shapes) for shapes, _ in measured])
    is_determined = bool(symbols) and len(measured) > 2 * len(symbols or ())
    return replace(first, measured=measured) if is_determined else first


@lru_cache(maxsize=8)
def sizes_of(measured: tuple[tuple[Shapes, tuple[int, ...]], ...]) -> SizeModel:
    """Return the size model fitted to `measured`, the value of `Profile.measured`. Models are cached, because the fit
    is slow.

    Copies of a profile with other times and codecs share one model.
    """
    return SizeModel(measured)


def _round_size(size: int, reference: int) -> int:
    """Return the upper bound of the size class of `size`: `reference` times a power of SIZE_CLASS_RATIO. Sizes up to
    MAX_EXACT_SIZE stay, but 1 becomes 2: one sample often runs other operators."""
    if size <= MAX_EXACT_SIZE:
        return size if size > 1 or reference == 1 else 2
    num_steps = math.ceil(math.log(size / reference, SIZE_CLASS_RATIO) - 1e-9)
    return max(size, math.ceil(reference * SIZE_CLASS_RATIO**num_steps - 1e-9))


def _batch_dimensions(shapes: Shapes) -> tuple[int, ...]:
    return tuple(n for _, size in shapes for n in size)


def _num_batch_elements(shapes: Shapes) -> int:
    return sum(prod(size) for _, size in shapes)


_SIZED_FIELDS = {
    "Profile": (
        *("kinds", "blocks", "shared", "other_heads", "outside_stored_bytes", "static_bytes", "outside_peak_bytes"),
        *("loss_peak_bytes", "tail_peak_bytes", "outside_live_bytes", "optimizer_peak_bytes"),
    ),
    "KindProfile": ("values", "operators", "forward", "backward", "tiles"),
    "Value": ("shape", "encoded_shape", "nbytes"),
    "Operator": ("extra_bytes",),
    "ForwardEvent": ("extra_bytes",),
    "BackwardEvent": ("entry_bytes", "extra_bytes"),
    "RowTiles": ("modules",),
    "ModuleTiles": ("num_rows",),
    "BlockProfile": ("forward_base_bytes", "backward_base_bytes"),
    "Shared": ("nbytes",),
    "Head": ("outside_stored_bytes", "outside_peak_bytes", "loss_peak_bytes"),
}
"""Fields of each record of a profile that contain byte counts and tensor sizes that depend on the batch's sizes."""


def _map_numbers(record: Any, change: Callable[[int], int]) -> Any:
    """Return a profile, or a part of it, with `change` applied to each number that depends on the batch's sizes."""
    if isinstance(record, int):
        return change(record)
    if isinstance(record, tuple):
        return tuple([_map_numbers(each, change) for each in record])
    if record is None:
        return None
    names = _SIZED_FIELDS[type(record).__name__]
    return replace(record, **{name: _map_numbers(getattr(record, name), change) for name in names})


def _with_times(before: Profile, after: Profile, ratio: float) -> Profile:
    """Return the profile `after` with the times of the profile `before`, scaled to the sizes of `after`. `ratio` is the
    number of elements in the batch of `after`, divided by the number in the batch of `before`. The times of the whole
    step and of the output heads are multiplied by `ratio`."""
    kinds = tuple(_timed_kind(old, new) for old, new in zip(before.kinds, after.kinds, strict=True))
    heads = tuple(replace(head, ms=head.ms * ratio) for head in after.other_heads)
    return replace(
        after, kinds=kinds, other_heads=heads, step_ms=before.step_ms * ratio, head_ms=before.head_ms * ratio
    )


def _timed_kind(before: KindProfile, after: KindProfile) -> KindProfile:
    launch_ms = min((op.ms for op in before.operators if op.ms > 0), default=0.0)
    operators = tuple(_timed_operator(op, before, after, launch_ms) for op in after.operators)
    return replace(after, operators=operators, forward_ms=sum(op.ms for op in operators))


def _timed_operator(operator: Operator, before: KindProfile, after: KindProfile, launch_ms: float) -> Operator:
    """Return `operator`, an operator in the block profile `after`, with a time estimated from the operator's time in
    the block profile `before`. The time is proportional to the bytes that the operator reads and writes, but not below
    the time `launch_ms` of a kernel launch."""
    accessed = (*operator.inputs, *operator.outputs)
    old_bytes, new_bytes = (sum(kind.values[v].nbytes for v in accessed) for kind in (before, after))
    ratio = new_bytes / old_bytes if old_bytes else 1.0
    return replace(operator, ms=max(operator.ms * ratio, min(operator.ms, launch_ms)))
