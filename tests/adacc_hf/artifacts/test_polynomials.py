"""Fits of polynomials to the numbers of a few calls: exact, or refused."""

from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.artifacts.polynomials import MAX_DEGREE, MAX_SYMBOLS, MAX_TERMS, Basis, independent_sizes

SIZES = st.integers(2, 500)


@st.composite
def sums(draw, max_symbols, max_terms):
    """Draw (number of symbols, {exponents: factor})."""
    num_symbols = draw(st.integers(1, max_symbols))
    exponents = st.tuples(*[st.integers(0, MAX_DEGREE - 1)] * num_symbols).filter(lambda e: sum(e) <= MAX_DEGREE)
    factors = st.integers(-4096, 4096).filter(bool)
    return num_symbols, draw(st.dictionaries(exponents, factors, min_size=1, max_size=max_terms))


def value_of(terms, sizes):
    return sum(
        factor * prod(n**e for n, e in zip(sizes, exponents, strict=True)) for exponents, factor in terms.items()
    )


def calls_of(draw, num_symbols, number):
    """Return the sizes of `number` calls, drawn independently."""
    random = Random(draw(st.integers(0, 2**32)))
    return [tuple(random.randrange(2, 5000) for _ in range(num_symbols)) for _ in range(number)]


@pytest.mark.parametrize(("max_symbols", "max_terms"), [(4, 1), (3, 2), (2, 3)])
@settings(max_examples=40)
@given(st.data())
def test_a_fitted_sum_of_products_is_exact_at_new_sizes(max_symbols, max_terms, data):
    num_symbols, terms = data.draw(sums(max_symbols, max_terms))
    calls = calls_of(data.draw, num_symbols, len(terms) + 4)
    basis = Basis(calls)
    polynomial = basis.fit(tuple(value_of(terms, call) for call in calls))
    assert polynomial is not None
    for new in calls_of(data.draw, num_symbols, 5):
        assert polynomial(basis.products(new)) == value_of(terms, new)


@settings(max_examples=40)
@given(st.data())
def test_a_fit_of_any_numbers_is_exact_in_the_fitted_calls(data):
    num_symbols = data.draw(st.integers(1, 3))
    calls = calls_of(data.draw, num_symbols, data.draw(st.integers(3, 6)))
    column = tuple(data.draw(st.lists(st.integers(-50, 50), min_size=len(calls), max_size=len(calls))))
    basis = Basis(calls)
    polynomial = basis.fit(column)
    assert polynomial is None or tuple(polynomial(basis.products(call)) for call in calls) == column


@given(st.integers(2, 64), st.lists(SIZES, min_size=6, max_size=6, unique=True), st.data())
def test_one_more_call_refutes_a_chance_fit_of_a_rounded_length(window, lengths, data):
    def rounded(n):
        return -(-n // window) * window

    calls = [(n,) for n in lengths]
    basis = Basis(calls)
    polynomial = basis.fit(tuple(rounded(n) for n in lengths))
    other = data.draw(SIZES.filter(lambda n: n not in lengths))
    if polynomial is None or polynomial(basis.products((other,))) == rounded(other):
        return
    larger_basis = Basis([*calls, (other,)])
    refitted = larger_basis.fit(tuple(rounded(n) for n in [*lengths, other]))
    assert refitted is None or refitted(larger_basis.products((other,))) == rounded(other)


def test_three_terms_of_which_one_is_negative_need_five_calls():
    calls = [(2, 11), (3, 24), (5, 60), (4, 37), (7, 18)]
    column = tuple(2 * b * s + 3 * s * s - 5 * b for b, s in calls)
    assert Basis(calls[:4]).fit(column[:4]) is None
    assert Basis(calls).fit(column) is not None


@given(st.lists(SIZES, min_size=6, max_size=6, unique=True), st.integers(0, 2**32))
def test_random_numbers_have_no_fit(lengths, seed):
    random = Random(seed)
    column = tuple(random.randrange(1, 10**9) for _ in lengths)
    assert Basis([(n,) for n in lengths]).fit(column) is None


@given(st.lists(SIZES, min_size=3, max_size=5, unique=True), st.integers(2, 8), SIZES)
def test_a_fraction_of_a_size_is_an_integer_or_none(halves, divisor, other):
    calls = [(n * divisor,) for n in halves]
    basis = Basis(calls)
    polynomial = basis.fit(tuple(halves))
    assert polynomial is not None
    number = polynomial(basis.products((other,)))
    assert number == other // divisor if other % divisor == 0 else number is None


@given(st.data())
def test_a_fit_has_fewer_terms_than_calls(data):
    num_terms = data.draw(st.integers(2, MAX_TERMS))
    calls = calls_of(data.draw, 2, num_terms)
    column = tuple(data.draw(st.lists(st.integers(1, 10**6), min_size=num_terms, max_size=num_terms, unique=True)))
    polynomial = Basis(calls).fit(column)
    assert polynomial is None or len(polynomial.terms) < num_terms


@given(st.data())
def test_a_fit_has_the_fewest_terms(data):
    num_symbols, terms = data.draw(sums(2, 1))
    calls = calls_of(data.draw, num_symbols, 5)
    polynomial = Basis(calls).fit(tuple(value_of(terms, call) for call in calls))
    assert len(polynomial.terms) == 1


def test_sizes_computed_from_other_sizes_are_not_independent():
    calls = [(b, s, 32, b * s, 2 * s + 1) for b, s in ((2, 11), (3, 24), (5, 60), (4, 7))]
    assert independent_sizes(calls) == (0, 1)


@given(st.data())
def test_all_sizes_follow_from_the_independent_sizes(data):
    num_symbols = data.draw(st.integers(1, 3))
    calls = calls_of(data.draw, num_symbols, 6)
    columns = list(zip(*calls, strict=True))
    places = independent_sizes(calls)
    assert places[0] == 0
    basis = Basis([tuple(call[place] for place in places) for call in calls])
    assert all(basis.fit(column) is not None for column in columns)


def test_equal_sizes_are_independent_once_a_call_has_them_different():
    calls = [(2, 11, 11), (3, 24, 24), (4, 60, 60)]
    assert independent_sizes(calls) == (0, 1)
    assert independent_sizes([*calls, (4, 60, 13)]) == (0, 1, 2)


def test_too_many_independent_sizes_are_refused():
    calls = [tuple(pow(7 + place, call + 2, 997) + call for place in range(MAX_SYMBOLS + 1)) for call in range(9)]
    assert independent_sizes(calls) is None


PARTS = [(2, 64, 96), (3, 32, 80), (3, 80, 32), (2, 128, 64), (2, 96, 128), (2, 128, 128)]
"""Samples and two lengths of some batches."""


@given(st.lists(st.integers(0, 10**6), min_size=6, max_size=6).map(tuple))
def test_an_approximation_is_nowhere_below_the_fitted_numbers(column):
    basis = Basis(PARTS)
    approximation = basis.approximate(column)
    assert all(approximation.ceil(basis.products(call)) >= n for call, n in zip(PARTS, column, strict=True))


def test_an_approximation_is_near_at_a_larger_size():
    """The numbers are measured peaks of a step."""
    peaks = {(3, 40): 17_924_788, (2, 72): 20_348_560, (2, 104): 26_539_152, (2, 129): 31_378_402, (3, 88): 31_840_564}
    basis = Basis([*peaks])
    assert basis.fit((*peaks.values(),)) is None
    approximation = basis.approximate((*peaks.values(),))
    assert approximation.ceil(basis.products((4, 129))) == pytest.approx(56_097_404, rel=0.01)
