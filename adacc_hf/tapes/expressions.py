"""Numbers as exact polynomials of a call's sizes, found from a few calls.

Sizes, strides, offsets and bytes of a block's tensors are sums of products of few sizes: batch, tokens, an encoder's
tokens. Which ones is found by trying, in exact integers: first a constant, then one product of sizes times a number, then
a sum of two and of three. What no further call would check is not believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, product
from math import prod

Sizes = tuple[int, ...]
"""The sizes of one call that others do not follow from."""
Column = tuple[int, ...]
"""One number in all of the calls, in their order."""

MOST_DEGREE = 3
"""Sizes in one product: batch x tokens x tokens is what attention's scores have."""
MOST_TERMS = 3
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

    def products(self, sizes: Sizes) -> list[int]:
        """The value of each product at `sizes`."""
        return [prod([n**e for n, e in zip(sizes, exponents, strict=True) if e]) for exponents in self._exponents]

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
            for places in combinations(range(len(self._columns)), num_terms):
                factors = _solve([self._columns[place] for place in places], column)
                if factors is not None and all(factors) and not (is_doubtful and min(factors) < 0):
                    return Polynomial(tuple(zip(factors, places, strict=True)))
        return None


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
