"""A profile at any size of batch: its numbers as exact polynomials of the batch's sizes, found from a few.

A profile is taken at one size, and its memory at three more (price/batch_subsampling.py). What is a sum of products of
sizes there, as the bytes of all tensors are, is found exactly (`Basis`). What is the larger of several
sums, as peaks are, may follow none: it is read off a line between the two sizes around, which lies above it, and beyond
the largest size off the line through the last two. Times go with the bytes that an operator reads and makes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from adacc_hf.artifacts.profile import Head, KindProfile, Operator, Profile, Value

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and size of each tensor of a batch."""
Change = Callable[[int], int]

STEP = 1.25
"""Ratio of neighbouring classes of sizes. Finer ones would use more of a budget, and take more policies."""

LINE_SHARE = 0.75
"""Part of a batch's elements that has to grow with all sizes that vary (samples and length) for memory to be read off a
line over the number of elements."""

FEW = 16
"""Sizes up to this are a class each."""


def numbers_of(profile: Profile) -> list[int]:
    """All numbers of `profile` that depend on the batch's sizes, in a fixed order; those of codecs follow from them."""
    numbers: list[int] = []

    def note(number: int) -> int:
        numbers.append(number)
        return number

    _changed(profile, note)
    return numbers


def profile_outline(profile: Profile) -> Any:
    """What profiles of one model at several sizes have in common: which values, operators and moments there are."""
    kinds = [
        (
            [
                (v.name, v.dtype, len(v.shape), v.producer, v.saved, v.activation, v.shared, v.equal_to)
                for v in kind.values
            ],
            [(op.name, op.inputs, op.outputs) for op in kind.operators],
            kind.slots,
            [(event.value, event.death) for event in kind.forward],
            [(event.slot, event.release) for event in kind.backward],
            kind.held,
            kind.untrusted,
        )
        for kind in profile.kinds
    ]
    blocks = [(block.name, block.kind) for block in profile.blocks]
    heads = [head.name for head in profile.other_heads]
    return kinds, blocks, [shared.name for shared in profile.shared], profile.head, heads


class ProfileSizes:
    """The profiles of one model at all sizes of a batch.

    `measured` is `Profile.measured`: the shapes and the numbers of the profile itself, then those of other sizes.
    """

    def __init__(self, measured: Sequence[tuple[Shapes, Sequence[int]]]) -> None:
        self._shapes = measured[0][0]
        calls = [_dimensions(shapes) for shapes, _ in measured]
        self._reference = calls[0]
        self._symbols = independent(calls) or ()
        self._basis = Basis([tuple(call[p] for p in self._symbols) for call in calls])
        self._following = [self._basis.fit(column) for column in zip(*calls, strict=True)]
        self._amounts = [_amount(shapes) for shapes, _ in measured]
        """Elements of each batch."""
        elements = self._basis.fit(tuple(self._amounts))
        smallest = tuple(min(calls, key=prod)[p] for p in self._symbols)
        self._are_lines = len(self._symbols) < 3 and (
            elements is None or self._basis.share_of_all(elements, smallest) >= LINE_SHARE
        )
        """True if a number that is no sum of products is read off a line over the elements of a batch. Elements of
        images grow with samples alone, where memory grows with a text's length too."""
        columns = list(zip(*(numbers for _, numbers in measured), strict=True))
        rules = {column: self._rule(column) for column in dict.fromkeys(columns)}
        self._rules = [rules[column] for column in columns]

    @property
    def uncertainty(self) -> float:
        """By which part a peak may lie above what is told of it: a line stands for the larger of several sums. More
        than two sizes that vary by themselves (samples, and the lengths of a pair of texts) make more terms than the
        measured parts can tell apart."""
        if self.is_rough:
            return 0.1
        return 0.04 if len(self._symbols) > 2 else 0.01

    @property
    def is_rough(self) -> bool:
        """True if a peak, the larger of several sums, is approximated by one sum of products (`Basis.nearest`).

        T5's peaks, predicted from small parts, were up to 9 % too low.
        """
        return any(isinstance(rule, _Nearest) for rule in self._rules)

    @property
    def largest(self) -> int:
        """Elements of the largest batch whose memory was measured."""
        return max(self._amounts)

    def class_of(self, shapes: Shapes) -> Shapes | None:
        """The shapes of the class that batches of `shapes` belong to: none of its batches is larger.

        Classes are as far apart as STEP says. None for a batch of other tensors, or one whose sizes hang together in
        another way than those of the batches that were measured.
        """
        own = {name: len(size) for name, size in self._shapes}
        shapes = tuple((name, size) for name, size in shapes if name in own)  # the Trainer's may have more
        if {name: len(size) for name, size in shapes} != own:
            return None
        given = _dimensions(shapes)
        products = self._basis.products(tuple(_rounded(given[p], self._reference[p]) for p in self._symbols))
        rounded = [polynomial(products) if polynomial else None for polynomial in self._following]
        if any(size is None or size < own for size, own in zip(rounded, given, strict=True)):
            return None
        sizes = (size for size in rounded if size is not None)
        return tuple((name, tuple(next(sizes) for _ in size)) for name, size in shapes)

    def at(self, profile: Profile, shapes: Shapes) -> Profile:
        """`profile`, the one that was measured or one with other prices, for batches of `shapes`.

        They are those of a batch that has a class. The profile's head is the one that it was measured with. Codecs are
        as they were: `other_sizes.at_size` has theirs too.
        """
        if shapes == self._shapes:
            return profile
        dimensions, amount = _dimensions(shapes), _amount(shapes)
        products = self._basis.products(tuple(dimensions[p] for p in self._symbols))
        before = self._basis.products(tuple(self._reference[p] for p in self._symbols))
        rules = iter(self._rules)

        def change(number: int) -> int:
            rule = next(rules)
            return number + rule(products, amount) - rule(before, self._amounts[0])

        told = _with_times(profile, _changed(profile, change), amount / self._amounts[0])
        return replace(told, measured=())

    def _rule(self, column: tuple[int, ...]) -> Callable[[Sequence[int], int], int]:
        exact = self._basis.fit(column)
        if exact is not None:
            return _Exact(exact, column[0])
        may_be_nearest = not self._are_lines and len(column) >= ENOUGH_CALLS
        nearest = self._basis.nearest(column) if may_be_nearest else None
        if nearest is not None:
            return _Nearest(*nearest)
        return _Line(sorted(zip(self._amounts, column, strict=True)))


@lru_cache(maxsize=8)
def sizes_of(measured: tuple[tuple[Shapes, tuple[int, ...]], ...]) -> ProfileSizes:
    """What `Profile.measured` tells of other sizes. Profiles with other prices share it: to find it takes a while."""
    return ProfileSizes(measured)


class _Exact:
    """A sum of products of sizes."""

    def __init__(self, polynomial: Polynomial, measured: int) -> None:
        self._polynomial, self._measured = polynomial, measured

    def __call__(self, products: Sequence[int], amount: int) -> int:
        number = self._polynomial(products)
        return self._measured if number is None else number


class _Nearest:
    """About a sum of products of sizes, and by how much at most it was too small."""

    def __init__(self, terms: tuple[tuple[float, int], ...], too_small: float) -> None:
        self._terms, self._too_small = terms, too_small

    def __call__(self, products: Sequence[int], amount: int) -> int:
        return math.ceil(sum(factor * products[place] for factor, place in self._terms) + self._too_small)


class _Line:
    """The lines through what was measured at several amounts of data."""

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        most: dict[int, int] = {}
        for amount, number in points:
            most[amount] = max(number, most.get(amount, number))
        self._points = sorted(most.items())

    def __call__(self, products: Sequence[int], amount: int) -> int:
        points = self._points
        if len(points) == 1:
            return points[0][1]
        place = min(max(bisect_left(points, (amount,)), 1), len(points) - 1)
        (less, low), (more, high) = points[place - 1], points[place]
        if amount < less:
            return min(low, high)
        return math.ceil(low + (high - low) * (amount - less) / (more - less))


def _rounded(size: int, reference: int) -> int:
    """The size of the class of `size`, of which `reference` is one. Few samples are not rounded, but for one alone: it
    often runs other operators, of which nothing is told, and has the room of two."""
    if size <= FEW:
        return size if size > 1 or reference == 1 else 2
    return max(size, math.ceil(reference * STEP ** math.ceil(math.log(size / reference, STEP) - 1e-9) - 1e-9))


def _dimensions(shapes: Shapes) -> tuple[int, ...]:
    return tuple(n for _, size in shapes for n in size)


def _amount(shapes: Shapes) -> int:
    return sum(prod(size) for _, size in shapes)


def _changed(profile: Profile, change: Change) -> Profile:
    """`profile` with `change` of each number that depends on sizes."""
    return replace(
        profile,
        kinds=tuple(_changed_kind(kind, change) for kind in profile.kinds),
        blocks=tuple(
            replace(
                block,
                forward_base_bytes=change(block.forward_base_bytes),
                backward_base_bytes=change(block.backward_base_bytes),
            )
            for block in profile.blocks
        ),
        shared=tuple(replace(shared, nbytes=change(shared.nbytes)) for shared in profile.shared),
        other_heads=tuple(_changed_head(head, change) for head in profile.other_heads),
        outside_stored_bytes=change(profile.outside_stored_bytes),
        static_bytes=change(profile.static_bytes),
        outside_peak_bytes=change(profile.outside_peak_bytes),
        loss_peak_bytes=change(profile.loss_peak_bytes),
        tail_peak_bytes=change(profile.tail_peak_bytes),
        outside_live_bytes=change(profile.outside_live_bytes),
        optimizer_peak_bytes=change(profile.optimizer_peak_bytes),
    )


def _changed_kind(kind: KindProfile, change: Change) -> KindProfile:
    return replace(
        kind,
        values=tuple(_changed_value(value, change) for value in kind.values),
        operators=tuple(replace(op, extra_bytes=change(op.extra_bytes)) for op in kind.operators),
        forward=tuple(replace(event, extra_bytes=change(event.extra_bytes)) for event in kind.forward),
        backward=tuple(
            replace(event, entry_bytes=change(event.entry_bytes), extra_bytes=change(event.extra_bytes))
            for event in kind.backward
        ),
    )


def _changed_value(value: Value, change: Change) -> Value:
    shape, encoded = tuple(map(change, value.shape)), tuple(map(change, value.encoded_shape))
    return replace(value, shape=shape, encoded_shape=encoded, nbytes=change(value.nbytes))


def _changed_head(head: Head, change: Change) -> Head:
    return replace(
        head,
        outside_stored_bytes=change(head.outside_stored_bytes),
        outside_peak_bytes=change(head.outside_peak_bytes),
        loss_peak_bytes=change(head.loss_peak_bytes),
        tail_peak_bytes=change(head.tail_peak_bytes),
        backward_base_bytes=tuple(map(change, head.backward_base_bytes)),
        outside_live_bytes=change(head.outside_live_bytes),
    )


def _with_times(before: Profile, after: Profile, ratio: float) -> Profile:
    """`after` with the times of `before`, as they are at its size.

    `ratio` is by how much more data there is: what runs outside of the blocks takes so much longer.
    """
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
    """`operator` with its time at another size: that of its bytes, but not less than it takes to launch one."""
    touched = (*operator.inputs, *operator.outputs)
    ratio = _ratio(sum(before.values[v].nbytes for v in touched), sum(after.values[v].nbytes for v in touched))
    return replace(operator, ms=min(operator.ms, launch_ms) if ratio == 0 else _scaled(operator.ms, ratio, launch_ms))


def _scaled(ms: float, ratio: float, least: float) -> float:
    return max(ms * ratio, min(ms, least))


def _ratio(before: int, after: int) -> float:
    return after / before if before else 1.0


# Numbers as exact polynomials of a call's sizes, found from a few calls.
#
# Sizes, strides, offsets and bytes of a block's tensors are sums of products of few sizes: batch, tokens, an encoder's
# tokens. Which ones is found by trying, in exact integers: first a constant, then one product of sizes times a number,
# then a sum of two and of three. What no further call would check is not believed.

Sizes = tuple[int, ...]
"""The sizes of one call that others do not follow from."""
Column = tuple[int, ...]
"""One number in all of the calls, in their order."""

MOST_DEGREE = 3
"""Sizes in one product: batch x tokens x tokens is what attention's scores have."""
MOST_TERMS = 3
ENOUGH_CALLS = 2 * MOST_TERMS
"""Calls from which on a sum of so many products may stand for a number that is none."""
NEAR = 1e-6
"""Part of a column's largest number by which a sum of products may miss it in floats, which round at 1e-16 of the
terms. Terms of opposite sign may be 1e9 times as large as their sum."""
MOST_SYMBOLS = 5
"""Sizes that vary by themselves. With more, products would be too many to choose from."""


class Polynomial:
    """A sum of products of sizes, each times an integer, over a common divisor. It is called with the products'
    values, which all polynomials of a `Basis` share."""

    __slots__ = ("divisor", "terms")

    def __init__(self, terms: tuple[tuple[int, int], ...], divisor: int = 1) -> None:
        self.terms = terms
        """(factor, place of the product in the basis)."""
        self.divisor = divisor

    def __call__(self, products: Sequence[int]) -> int | None:
        """The number, or None where it is none that a size could be: a fraction."""
        total = 0
        for factor, place in self.terms:
            total += factor * products[place]
        if self.divisor == 1:
            return total
        number, rest = divmod(total, self.divisor)
        return None if rest else number

    def __repr__(self) -> str:
        return f"Polynomial({self.terms}, {self.divisor})"


class Basis:
    """The products of the sizes of some calls, out of which numbers are made.

    `calls` has the sizes of each call; none may be another's twice (see `independent`).
    """

    def __init__(self, calls: Sequence[Sizes]) -> None:
        self._exponents = _exponents(len(calls[0]))
        self._columns = list(zip(*map(self.products, calls), strict=True))
        self._num_calls = len(calls)
        self._combined: dict[int, tuple[Any, Any, Any]] = {}
        """By number of terms, what `_combinations` returns."""

    def products(self, sizes: Sizes) -> list[int]:
        """The value of each product at `sizes`."""
        return [prod([n**e for n, e in zip(sizes, exponents, strict=True) if e]) for exponents in self._exponents]

    def share_of_all(self, polynomial: Polynomial, sizes: Sizes) -> float:
        """Return the part of what `polynomial` gives at `sizes` that comes from products of all sizes."""
        products = self.products(sizes)
        with_all = [f * products[p] for f, p in polynomial.terms if all(self._exponents[p])]
        return sum(with_all) / max(1, sum(f * products[p] for f, p in polynomial.terms))

    def fit(self, column: Column) -> Polynomial | None:
        """The polynomial of fewest terms that gives each call's number, and at least one that it was not made from.

        There are so many of three terms that two have to be, where a term is subtracted: sums of bytes have none such.
        """
        if len(set(column)) == 1:
            return Polynomial(((column[0], 0),)) if column[0] else Polynomial(())
        single = next(filter(None, (_times(factor, column, p) for p, factor in enumerate(self._columns))), None)
        if single is not None:
            return single
        for num_terms in range(2, MOST_TERMS + 1):
            if self._num_calls <= num_terms:
                return None
            is_doubtful = self._num_calls < 2 * num_terms - 1
            for places in self._near(num_terms, column):
                factors = _solve([self._columns[place] for place in places], column)
                if factors is not None and all(factors) and not (is_doubtful and min(factors) < 0):
                    return Polynomial(tuple(zip(factors, places, strict=True)))
        return None

    def nearest(self, column: Column) -> tuple[tuple[tuple[float, int], ...], float] | None:
        """Fit `column` by least squares with up to three products of sizes. Return None if no fit is possible.

        Returns ((factor, place of the product), ...) with factors of 0 or more, and the largest amount by which the fit
        is below a measured number. Used for peaks of two texts, which are the larger of several sums of different
        products: a line through two calls would confuse the length of one text with that of the other.
        """
        if len(self._columns) < MOST_TERMS:
            return None
        places, matrices, inverses = self._combinations(MOST_TERMS)
        wanted = np.array(column, dtype=np.float64)
        factors = inverses @ wanted
        distance = np.square((matrices @ factors[:, :, None])[:, :, 0] - wanted).sum(axis=1)
        distance[(factors < 0).any(axis=1)] = np.inf
        best = int(distance.argmin())
        if not np.isfinite(distance[best]):
            return None
        too_small = float((wanted - matrices[best] @ factors[best]).max())
        scaled = factors[best] / self._norms()[places[best]]
        return tuple(zip(scaled.tolist(), places[best].tolist(), strict=True)), max(0.0, too_small)

    def _near(self, num_terms: int, column: Column) -> Iterator[tuple[int, ...]]:
        """The places of products of which so many add up to about `column`: whether they do is for integers to say."""
        if len(self._columns) < num_terms:
            return
        places, matrices, inverses = self._combinations(num_terms)
        wanted = np.array(column, dtype=np.float64)
        distance = np.abs((matrices @ (inverses @ wanted)[:, :, None])[:, :, 0] - wanted).max(axis=1)
        for place in np.flatnonzero(distance <= NEAR * np.abs(wanted).max()):
            yield tuple(places[place].tolist())

    def _norms(self) -> Any:
        return np.maximum(np.linalg.norm(np.array(self._columns, dtype=np.float64), axis=1), 1.0)

    def _combinations(self, num_terms: int) -> tuple[Any, Any, Any]:
        """(places, values in each call, pseudo-inverses) of every choice of so many products, each of norm 1."""
        found = self._combined.get(num_terms)
        if found is None:
            products = np.array(self._columns, dtype=np.float64) / self._norms()[:, None]
            places = np.array(list(combinations(range(len(products)), num_terms)))
            matrices = products[places].transpose(0, 2, 1)
            found = self._combined[num_terms] = places, matrices, np.linalg.pinv(matrices)
        return found


@cache
def _exponents(num_sizes: int) -> list[tuple[int, ...]]:
    """Of each product the exponent of each size, the lowest degree first; 1 itself is the first product."""
    every = [e for e in product(range(MOST_DEGREE), repeat=num_sizes) if sum(e) <= MOST_DEGREE]
    return sorted(every, key=lambda e: (sum(e), max(e, default=0)))


def _times(factor: Column, column: Column, place: int) -> Polynomial | None:
    """`column` as `factor` times one number, which may be a fraction (half of the tokens)."""
    above, below = column[0], factor[0]
    if below == 0 or any(n * below != above * f for n, f in zip(column, factor, strict=True)):
        return None
    number, rest = divmod(above, below)
    return Polynomial(((above, place),), below) if rest else Polynomial(((number, place),))


def _solve(columns: list[Column], wanted: Column) -> tuple[int, ...] | None:
    """The integers by which `columns` add up to `wanted` in every call; None if there are none, or many."""
    size = len(columns)
    rows = list(zip(*columns, wanted, strict=True))
    matrix = [list(row) for row in rows]
    # Gauss without fractions: each row stays a multiple of what it would be.
    for pivot in range(size):
        chosen = next((r for r in range(pivot, len(matrix)) if matrix[r][pivot]), None)
        if chosen is None:
            return None
        matrix[pivot], matrix[chosen] = matrix[chosen], matrix[pivot]
        top = matrix[pivot]
        for r, row in enumerate(matrix):
            if r != pivot and row[pivot]:
                lead, head = top[pivot], row[pivot]
                matrix[r] = [lead * x - head * y for x, y in zip(row, top, strict=True)]
    if any(row[size] for row in matrix[size:]):
        return None
    factors = []
    for place in range(size):
        number, rest = divmod(matrix[place][size], matrix[place][place])
        if rest:
            return None
        factors.append(number)
    return tuple(factors)


def independent(calls: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The places of the numbers that vary by themselves; all others are constant, or follow from those before them.

    None if too many do. What follows by chance in these calls is found out by the first call in which it does not.
    """
    places: list[int] = []
    basis = Basis([()] * len(calls))
    for place, column in enumerate(zip(*calls, strict=True)):
        if basis.fit(column) is None:
            places.append(place)
            if len(places) > MOST_SYMBOLS:
                return None
            basis = Basis([tuple(call[p] for p in places) for call in calls])
    return tuple(places)
