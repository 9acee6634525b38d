"""Exact integer polynomials of tensor sizes, fitted to numbers from a few calls of a block.

The sizes, strides, offsets and bytes of a block's tensors are sums of products of a few sizes, such as batch size and
sequence length. A fit tries a constant, then one product of sizes times a factor, then sums of two and of three
products, all in exact arithmetic. A fit is accepted only if at least one call that was not used for the fit confirms
the fit. A peak is the maximum of several sums. If no sum gives its numbers exactly, it is approximated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from math import ceil, prod
from typing import Any

import numpy as np

Sizes = tuple[int, ...]
"""The independent sizes of one call of a block (see `independent_sizes`)."""
Column = tuple[int, ...]
"""Values of one number, such as the bytes of a tensor, in all calls, in the order of the calls."""

MAX_DEGREE = 3
"""Maximum number of sizes multiplied in one product. The number of attention scores, for example, grows with batch x
tokens x tokens."""
MAX_TERMS = 3
NEAR = 0.005
"""Largest relative distance from the fitted numbers at which an approximation needs no further product of sizes. With
more products than needed, it may be far from the numbers of larger batches."""
RELATIVE_TOLERANCE = 1e-6
"""Largest floating-point error of a candidate sum of products, relative to the largest number that is fitted. The
rounding error of a term is about 1e-16 of the term, and terms of opposite sign may be 1e9 times as large as the sum."""
MAX_SYMBOLS = 5
"""Maximum number of independent sizes. With more sizes, there are too many combinations of products to try."""


class Polynomial:
    """A sum of products of sizes, each with an integer factor (3 x samples x tokens + 2 x tokens), or one product over
    an integer divisor.

    To evaluate the polynomial, call it with the values of the products (`Basis.products`).
    """

    __slots__ = ("divisor", "terms")

    def __init__(self, terms: tuple[tuple[int, int], ...], divisor: int = 1) -> None:
        self.terms = terms
        """(factor, index of the product in the basis) of each term."""
        self.divisor = divisor

    def __call__(self, products: Sequence[int]) -> int | None:
        """Evaluate the polynomial. Return None if the result is not an integer."""
        total = 0
        for factor, place in self.terms:
            total += factor * products[place]
        if self.divisor == 1:
            return total
        quotient, remainder = divmod(total, self.divisor)
        return None if remainder else quotient

    def ceil(self, products: Sequence[int]) -> int:
        """Evaluate the polynomial, and round the result up to an integer."""
        return -(-sum(factor * products[place] for factor, place in self.terms) // self.divisor)

    def __repr__(self) -> str:
        return f"Polynomial({self.terms}, {self.divisor})"


class Approximation:
    """A sum of products of sizes with float factors, plus a constant so that no fitted number is above the sum."""

    def __init__(self, terms: tuple[tuple[float, int], ...], shortfall: float) -> None:
        self._terms, self._shortfall = terms, shortfall

    def ceil(self, products: Sequence[int]) -> int:
        """Evaluate the sum, and round the result up to an integer."""
        return ceil(sum(factor * products[place] for factor, place in self._terms) + self._shortfall)


class Basis:
    """Products of tensor sizes, such as batch size x sequence length, of which polynomials are sums.

    `calls` has the independent sizes of each call (see `independent_sizes`). No two calls have the same sizes.
    """

    def __init__(self, calls: Sequence[Sizes]) -> None:
        self._exponents = _product_exponents(len(calls[0]))
        self._columns = list(zip(*map(self.products, calls), strict=True))
        self.num_calls = len(calls)
        self._combined: dict[int, tuple[Any, Any, Any]] = {}

    def products(self, sizes: Sizes) -> list[int]:
        """Return the value of each product at `sizes`."""
        return [prod([n**e for n, e in zip(sizes, exponents, strict=True) if e]) for exponents in self._exponents]

    def fit(self, column: Column, max_terms: int = MAX_TERMS) -> Polynomial | None:
        """Return the polynomial with the fewest terms that gives the numbers in `column` exactly, or None if no
        polynomial does.

        `column` has one number for each call of a block, for example the bytes of a tensor.

        A polynomial with n terms is accepted only if there are at least n + 1 calls: n calls determine the factors, and
        one more checks them. If a factor is negative, more calls are needed: five for three terms, and seven for four
        terms. Many combinations of terms are tried, so one of them might fit fewer calls by chance. Numbers of bytes
        are sums without negative factors. The factors of several terms are integers.
        """
        if len(set(column)) == 1:
            return Polynomial(((column[0], 0),)) if column[0] else Polynomial(())
        products = enumerate(self._columns)
        single = next(filter(None, (_fit_single_product(values, column, place) for place, values in products)), None)
        if single is not None:
            return single
        for num_terms in range(2, max_terms + 1):
            if self.num_calls <= num_terms:
                return None
            is_doubtful = self.num_calls < 2 * num_terms - 1
            for places in self._candidate_places(num_terms, column):
                solution = solve_integers([self._columns[place] for place in places], column)
                if solution is not None and all(solution) and not (is_doubtful and min(solution) < 0):
                    return Polynomial(tuple(zip(solution, places, strict=True)))
        return None

    def approximate(self, column: Column) -> Approximation:
        """Fit `column` by least squares with the fewest products of sizes that come near it, fewer than there are
        calls. The factors are 0 or more, as for the peak memory of a step. Without such a fit, the result is the
        largest number."""
        target = np.array(column, dtype=np.float64)
        fit = Approximation((), float(target.max()))
        for num_terms in range(1, min(MAX_TERMS, self.num_calls - 1, len(self._columns)) + 1):
            places, matrices, inverses = self._combinations(num_terms)
            factors = inverses @ target
            excess = target - (matrices @ factors[:, :, None])[:, :, 0]
            distance = np.square(excess).sum(axis=1)
            distance[(factors < 0).any(axis=1)] = np.inf
            best = int(distance.argmin())
            if not np.isfinite(distance[best]):
                break
            scaled = factors[best] / self._norms()[places[best]]
            terms = tuple(zip(scaled.tolist(), places[best].tolist(), strict=True))
            fit = Approximation(terms, max(0.0, float(excess[best].max())))
            if np.abs(excess[best]).max() <= NEAR * np.abs(target).max():
                break
        return fit

    def _candidate_places(self, num_terms: int, column: Column) -> Iterator[tuple[int, ...]]:
        """Yield each choice of `num_terms` products whose linear combination fits `column` in floating-point
        arithmetic. Each product is a monomial of the batch's sizes, such as batch * tokens^2. A choice is a tuple of
        the products' places (indices) in this basis. The caller must check in exact integers that the fit is exact."""
        if len(self._columns) < num_terms:
            return
        places, matrices, inverses = self._combinations(num_terms)
        target = np.array(column, dtype=np.float64)
        distance = np.abs((matrices @ (inverses @ target)[:, :, None])[:, :, 0] - target).max(axis=1)
        for place in np.flatnonzero(distance <= RELATIVE_TOLERANCE * np.abs(target).max()):
            yield tuple(places[place].tolist())

    def _norms(self) -> Any:
        return np.maximum(np.linalg.norm(np.array(self._columns, dtype=np.float64), axis=1), 1.0)

    def _combinations(self, num_terms: int) -> tuple[Any, Any, Any]:
        """Return (indices, matrices, pseudo-inverses), each with one item for every choice of `num_terms` products of
        sizes. A matrix contains the values of the chosen products in all measured calls. Each product's values are
        scaled to norm 1."""
        combined = self._combined.get(num_terms)
        if combined is None:
            products = np.array(self._columns, dtype=np.float64) / self._norms()[:, None]
            places = np.array(list(combinations(range(len(products)), num_terms)))
            matrices = products[places].transpose(0, 2, 1)
            combined = self._combined[num_terms] = places, matrices, np.linalg.pinv(matrices)
        return combined


@cache
def _product_exponents(num_sizes: int) -> list[tuple[int, ...]]:
    """Return the exponents of the sizes in each product, by ascending degree. The first product is the constant 1."""
    exponents = [e for e in product(range(MAX_DEGREE), repeat=num_sizes) if sum(e) <= MAX_DEGREE]
    return sorted(exponents, key=lambda e: (sum(e), max(e, default=0)))


def _fit_single_product(values: Column, column: Column, place: int) -> Polynomial | None:
    """Fit `column` as one factor times `values`, the product with index `place`. Return None if there is no fit. The
    factor may be a fraction, for example if a tensor has half of the tokens."""
    numerator, denominator = column[0], values[0]
    if denominator == 0 or any(n * denominator != numerator * v for n, v in zip(column, values, strict=True)):
        return None
    quotient, remainder = divmod(numerator, denominator)
    return Polynomial(((numerator, place),), denominator) if remainder else Polynomial(((quotient, place),))


def solve_integers(columns: list[Column], target: Column) -> tuple[int, ...] | None:
    """Return one integer factor per column such that the sum of factor * column equals `target` in every call.

    A column contains one number per call. Return None if there is no solution, or more than one solution.
    """
    size = len(columns)
    rows = list(zip(*columns, target, strict=True))
    matrix = [list(row) for row in rows]
    # Gauss-Jordan elimination without fractions: each row is an integer multiple of the row with fractions.
    for pivot in range(size):
        pivot_row = next((r for r in range(pivot, len(matrix)) if matrix[r][pivot]), None)
        if pivot_row is None:
            return None
        matrix[pivot], matrix[pivot_row] = matrix[pivot_row], matrix[pivot]
        top = matrix[pivot]
        for r, row in enumerate(matrix):
            if r != pivot and row[pivot]:
                lead, head = top[pivot], row[pivot]
                matrix[r] = [lead * x - head * y for x, y in zip(row, top, strict=True)]
    if any(row[size] for row in matrix[size:]):
        return None
    divided = [divmod(matrix[place][size], matrix[place][place]) for place in range(size)]
    return None if any(rest for _, rest in divided) else tuple(factor for factor, _ in divided)


def independent_sizes(calls: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the indices of the tensor sizes that vary independently between `calls`: the variables of the polynomials.

    Every other size is constant, or follows from earlier independent sizes, as 2 x tokens follows from tokens. If two
    sizes are related by chance in `calls`, one of them is missing from the result until a call without this relation is
    added. Return None if more than MAX_SYMBOLS sizes vary independently.
    """
    places: list[int] = []
    basis = Basis([()] * len(calls))
    for place, column in enumerate(zip(*calls, strict=True)):
        if basis.fit(column) is None:
            places.append(place)
            if len(places) > MAX_SYMBOLS:
                return None
            basis = Basis([tuple(call[p] for p in places) for call in calls])
    return tuple(places)
