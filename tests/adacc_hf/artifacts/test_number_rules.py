"""Rules of a profile's numbers at other sizes: sums of products, differences from neighbours, approximations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacc_hf.artifacts.number_rules import Difference, Exact, Interpolation, LeastSquares, RuleFit
from adacc_hf.artifacts.polynomials import Basis

PARTS = [(2, 64, 96), (3, 32, 80), (3, 80, 32), (2, 128, 64), (2, 96, 128), (2, 128, 128)]
"""Samples and two lengths of the batches from which a pair of texts is predicted."""
WHOLE = (8, 256, 200)


def rules_of(*functions, calls=PARTS, uses_lines=False):
    """Return the basis of `calls`, and the rules of numbers that are `functions` of the sizes, in this order."""
    basis = Basis(calls)
    num_elements = [samples * sum(lengths) for samples, *lengths in calls]
    columns = [tuple(function(*call) for call in calls) for function in functions]
    return basis, RuleFit(basis, num_elements, uses_lines).rules(columns)


def at(basis, rule, sizes):
    return rule(basis.products(sizes), sizes[0] * sum(sizes[1:]))


def gradients(samples, first, second):
    """Live bytes with more terms than the six parts determine."""
    return 2000 + 4 * samples * first + 16 * samples * second + 64 * samples * first * second + 4 * second * second


def test_a_number_of_too_many_terms_follows_from_a_neighbour():
    """Live bytes at a moment are those at the moment before, plus one tensor."""
    basis, (alone,) = rules_of(gradients)
    assert isinstance(alone, LeastSquares)
    assert at(basis, alone, WHOLE) != gradients(*WHOLE)
    moments = [
        lambda b, s, t: 2000 + 16 * b * t,
        lambda b, s, t: 2000 + 16 * b * t + 4 * b * s,
        lambda b, s, t: 2000 + 16 * b * t + 4 * b * s + 4 * t * t,
        gradients,
    ]
    for order in (moments, moments[::-1]):  # the neighbour with a rule comes before or after
        basis, rules = rules_of(*order)
        assert all(isinstance(rule, Exact) for rule in rules)
        assert [at(basis, rule, WHOLE) for rule in rules] == [moment(*WHOLE) for moment in order]


def test_four_terms_are_fitted_to_six_batches():
    def four_terms(samples, first, second):
        return 500 + 12 * samples * first + 64 * samples * first * second + 4 * first * first

    basis, (rule,) = rules_of(four_terms)
    assert at(basis, rule, WHOLE) == four_terms(*WHOLE)


def test_a_number_near_an_approximated_one_has_the_same_error():
    def peak(samples, first, second):
        return max(64 * samples * first * first, 4000 + 70 * samples * second * first)

    def released(samples, first, second):
        return peak(samples, first, second) - 4 * samples * first * second

    basis, (approximated, near) = rules_of(peak, released)
    assert isinstance(approximated, LeastSquares)
    assert isinstance(near, Difference)
    assert at(basis, approximated, WHOLE) - at(basis, near, WHOLE) == 4 * 8 * 256 * 200


def test_few_batches_do_not_check_a_difference():
    """Three batches check a difference of two terms once: one of many neighbours would fit by chance."""
    calls = PARTS[:3]
    _, rules = rules_of(lambda b, s, t: 2000 + 16 * b * t, gradients, calls=calls, uses_lines=True)
    assert isinstance(rules[1], Interpolation)


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=6, max_size=6).map(tuple), min_size=1, max_size=6))
def test_rules_are_exact_or_above_in_the_measured_batches(columns):
    basis = Basis(PARTS)
    num_elements = [samples * sum(lengths) for samples, *lengths in PARTS]
    for column, rule in zip(columns, RuleFit(basis, num_elements, False).rules(columns), strict=True):
        for number, sizes in zip(column, PARTS, strict=True):
            predicted = at(basis, rule, sizes)
            assert predicted == number if isinstance(rule, Exact) else predicted >= number


def test_a_line_above_the_measured_sizes_does_not_follow_from_two_close_ones():
    """2 x 129 and 3 x 88 tokens differ by 2 %, and their measured peaks by their shapes."""
    peaks = {(3, 40): 17_924_788, (2, 72): 20_348_560, (2, 104): 26_539_152, (2, 129): 31_378_402, (3, 88): 31_840_564}
    interpolation = Interpolation([(samples * length, peak) for (samples, length), peak in peaks.items()])
    assert interpolation((), 4 * 129) == pytest.approx(56_097_404, rel=0.01)
    falling = Interpolation([(100, 1000), (200, 1200), (204, 1190)])
    assert falling((), 400) > 1500
