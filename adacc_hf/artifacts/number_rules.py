"""Rules: formulas that predict the numbers of a profile (bytes, shapes) at other sizes of a batch, fitted to a few
measured batches.

Most numbers are a sum of a few products of sizes, for example 8 x samples x tokens + 4 x tokens bytes. Such a sum is
fitted exactly (`polynomials.py`).

The live bytes at one moment of a step may be a sum of so many products that a few batches do not determine them. A
profile lists the live bytes of all moments in order of time, and from one moment to the next only one or two tensors
are added or freed. The difference between the two numbers is therefore a short sum, which is fitted exactly. If one of
the two numbers has a rule, the rule of the other is this rule plus the difference.

A peak is the maximum of several sums. If neither kind of rule fits a peak, the peak is approximated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

from adacc_hf.artifacts.polynomials import MIN_LEAST_SQUARES_CALLS, Basis, Column, Polynomial

MAX_TERMS_OF_SUM = 4
MAX_TERMS_OF_DIFFERENCE = 2
MIN_CHECKS = 3
"""Minimum number of measured batches that confirm a fitted difference between two numbers of a profile. A number is
compared with many neighbouring numbers, and with fewer confirmations, one of the differences may fit by chance."""
NEIGHBOURS = 8
"""Maximum distance, in the order in which a profile lists its numbers, between two numbers whose difference is
fitted."""
MIN_LINE_RATIO = 1.25
"""Minimum ratio of the sizes of two measured batches from which numbers are extrapolated linearly to larger batches."""


class Rule(Protocol):
    """Rule: formula for one number of the profile as a function of the sizes of a batch."""

    def __call__(self, products: Sequence[int], num_elements: int) -> int:
        """Evaluate the formula for a batch with `num_elements` elements. Return the number that the batch's profile
        would contain.

        `products` contains one integer for each term of a `Basis` (a product of sizes), evaluated for this batch.
        """
        ...


class RuleFit:
    """Fit of rules (formulas that depend on the batch's sizes) to numbers measured on a few batches.

    `basis` contains the products of the batches' sizes, and `num_elements` the batches' numbers of elements. If
    `uses_lines`, a number that is not a sum of such products is interpolated linearly by the batches' numbers of
    elements.
    """

    def __init__(self, basis: Basis, num_elements: Sequence[int], uses_lines: bool) -> None:
        self._basis, self._num_elements, self._uses_lines = basis, num_elements, uses_lines
        self._max_difference_terms = min(MAX_TERMS_OF_DIFFERENCE, basis.num_calls - MIN_CHECKS)
        self._differences: dict[Column, Polynomial | None] = {}

    def rules(self, columns: Sequence[Column]) -> list[Rule]:
        """Return the rule of each column. A column contains the values of one number in all measured batches.

        The columns are in the order of the profile's numbers. Kinds of rules are tried from the most to the least
        certain. Once a number has a rule, neighbouring numbers are fitted as this number plus a difference.
        """
        distinct = list(dict.fromkeys(columns))
        rules: dict[Column, Rule] = {}
        for column in distinct:
            polynomial = self._basis.fit(column, MAX_TERMS_OF_DIFFERENCE, with_fractions=True)
            if polynomial is not None:
                rules[column] = Exact(polynomial)
        self._add_neighbours(distinct, rules)
        for fit in (self._exact_sum, self._approximation):
            for column in distinct:
                if column not in rules and (rule := fit(column)) is not None:
                    rules[column] = rule
                    self._add_neighbours(distinct, rules)
        return [rules[column] for column in columns]

    def _exact_sum(self, column: Column) -> Rule | None:
        """Return the rule for a number of the profile that is exactly a polynomial of the batch's sizes, else None.
        `column` contains the number's value for each measured batch."""
        polynomial = self._basis.fit(column, MAX_TERMS_OF_SUM, with_fractions=True)
        return None if polynomial is None else Exact(polynomial)

    def _approximation(self, column: Column) -> Rule:
        """Return an approximate rule for a number of the profile that is not exactly a polynomial of the batch's sizes.
        `column` contains the number's value for each measured batch."""
        allows_least_squares = not self._uses_lines and len(column) >= MIN_LEAST_SQUARES_CALLS
        approximation = self._basis.fit_least_squares(column) if allows_least_squares else None
        if approximation is not None:
            return LeastSquares(*approximation)
        return Interpolation(sorted(zip(self._num_elements, column, strict=True)))

    def _add_neighbours(self, columns: Sequence[Column], rules: dict[Column, Rule]) -> None:
        """Add rules for columns that are the sum of a neighbouring column and an exactly fitted polynomial. A column
        contains the values of one number of the profile for all measured batches. The neighbouring column must have a
        rule."""
        if self._max_difference_terms < 1:
            return
        num_rules = -1
        while num_rules < len(rules):
            num_rules = len(rules)
            for place, column in enumerate(columns):
                if column not in rules and (rule := self._from_neighbour(columns, place, rules)) is not None:
                    rules[column] = rule

    def _from_neighbour(self, columns: Sequence[Column], place: int, rules: dict[Column, Rule]) -> Rule | None:
        """Return a rule for the column at `place`: the rule of a nearby column plus a polynomial with few terms. A
        column contains the values of one number of the profile for all measured batches. Return None if no nearby
        column gives an exact fit."""
        column = columns[place]
        best: tuple[Rule, Polynomial] | None = None
        for neighbour in _neighbour_columns(columns, place):
            if neighbour not in rules:
                continue
            difference = self._difference(tuple(a - b for a, b in zip(column, neighbour, strict=True)))
            if difference is not None and (best is None or len(difference.terms) < len(best[1].terms)):
                best = rules[neighbour], difference
                if len(difference.terms) <= 1:
                    break
        return None if best is None else _rule_plus(*best)

    def _difference(self, column: Column) -> Polynomial | None:
        """Return the polynomial of the batch's sizes that gives `column` exactly, or None if no polynomial does.
        `column` contains, for each measured batch, the difference between two neighbouring numbers of the profile."""
        if column not in self._differences:
            self._differences[column] = self._basis.fit(column, self._max_difference_terms)
        return self._differences[column]


def _neighbour_columns(columns: Sequence[Column], place: int) -> Iterator[Column]:
    """Yield the columns before and after the column with index `place`, the nearest first. A column contains the values
    of one number of the profile for all measured batches."""
    for distance in range(1, NEIGHBOURS + 1):
        if distance <= place:
            yield columns[place - distance]
        if place + distance < len(columns):
            yield columns[place + distance]


def _rule_plus(rule: Rule, difference: Polynomial) -> Rule:
    if isinstance(rule, Exact):
        return Exact(rule.polynomial + difference)
    if isinstance(rule, Difference):
        return Difference(rule.other, rule.polynomial + difference)
    return Difference(rule, difference)


class Exact:
    """Rule for a number, such as the bytes of a tensor, that is exactly a polynomial of the batch's sizes.

    If the polynomial's value for a batch is not an integer, the rule rounds it up.
    """

    def __init__(self, polynomial: Polynomial) -> None:
        self.polynomial = polynomial

    def __call__(self, products: Sequence[int], num_elements: int) -> int:
        return self.polynomial.ceil(products)


class Difference:
    """Rule that adds a polynomial of the sizes to the approximate rule of another number of the profile."""

    def __init__(self, other: Rule, polynomial: Polynomial) -> None:
        self.other, self.polynomial = other, polynomial

    def __call__(self, products: Sequence[int], num_elements: int) -> int:
        return self.other(products, num_elements) + self.polynomial.ceil(products)


class LeastSquares:
    """Rule that approximates a number by a sum of products of sizes, fitted by least squares.

    The rule adds a constant, so that its result is not below any measured number.
    """

    def __init__(self, terms: tuple[tuple[float, int], ...], shortfall: float) -> None:
        self._terms, self._shortfall = terms, shortfall

    def __call__(self, products: Sequence[int], num_elements: int) -> int:
        return math.ceil(sum(factor * products[place] for factor, place in self._terms) + self._shortfall)


class Interpolation:
    """Rule of a number that is interpolated linearly between measured batches, by their numbers of elements.

    Between two measured batches, the interpolated peak is at least as high as the real peak. For larger batches than
    all measured ones, the line through the largest and the next clearly smaller batch is extrapolated.
    """

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        maxima: dict[int, int] = {}
        for num_elements, number in points:
            maxima[num_elements] = max(number, maxima.get(num_elements, number))
        self._points = sorted(maxima.items())
        largest = self._points[-1][0]
        smaller = [point for point in self._points if point[0] * MIN_LINE_RATIO <= largest] or self._points[:1]
        high = max(number for num_elements, number in self._points if num_elements >= smaller[-1][0])
        self._line = smaller[-1], (largest, high)
        """Two points (number of elements, value) of the line that is used for batches larger than all measured batches.
        The two points are not close to each other: sizes such as 3 x 88 and 2 x 129 tokens differ more in shape than in
        number of tokens, and a line through two such points may fall."""

    def __call__(self, products: Sequence[int], num_elements: int) -> int:
        points = self._points
        if len(points) == 1:
            return points[0][1]
        place = min(max(bisect_left(points, (num_elements,)), 1), len(points) - 1)
        (start, low), (end, high) = points[place - 1], points[place]
        if num_elements > end:
            (start, low), (end, high) = self._line
        if num_elements < start:
            return min(low, high)
        return math.ceil(low + (high - low) * (num_elements - start) / (end - start))
