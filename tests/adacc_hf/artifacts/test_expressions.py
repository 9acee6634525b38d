"""Polynomials of sizes are found from a few calls exactly, or not at all."""

from math import prod
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adacc_hf.artifacts.size_model import (
    MOST_DEGREE,
    MOST_SYMBOLS,
    MOST_TERMS,
    Basis,
    Polynomial,
    _solve,
    independent,
)

SIZES = st.integers(2, 500)


@st.composite
def sums(draw, most_symbols, most_terms):
    """(number of symbols, {exponents: factor})"""
    num_symbols = draw(st.integers(1, most_symbols))
    exponents = st.tuples(*[st.integers(0, MOST_DEGREE - 1)] * num_symbols).filter(lambda e: sum(e) <= MOST_DEGREE)
    factors = st.integers(-4096, 4096).filter(bool)
    return num_symbols, draw(st.dictionaries(exponents, factors, min_size=1, max_size=most_terms))


def value_of(terms, sizes):
    return sum(
        factor * prod(n**e for n, e in zip(sizes, exponents, strict=True)) for exponents, factor in terms.items()
    )


def calls_of(draw, num_symbols, number):
    """Sizes that hang together in no way."""
    random = Random(draw(st.integers(0, 2**32)))
    return [tuple(random.randrange(2, 5000) for _ in range(num_symbols)) for _ in range(number)]


@pytest.mark.parametrize(("most_symbols", "most_terms"), [(4, 1), (3, 2), (2, 3)])
@settings(max_examples=40)
@given(st.data())
def test_a_sum_of_products_is_found_and_holds_at_new_sizes(most_symbols, most_terms, data):
    num_symbols, terms = data.draw(sums(most_symbols, most_terms))
    calls = calls_of(data.draw, num_symbols, len(terms) + 4)
    basis = Basis(calls)
    found = basis.fit(tuple(value_of(terms, call) for call in calls))
    assert found is not None
    for new in calls_of(data.draw, num_symbols, 5):
        assert found(basis.products(new)) == value_of(terms, new)


def test_three_terms_of_four_sizes_are_found():
    terms = {(1, 1, 0, 0): 768, (1, 0, 1, 1): -3, (0, 0, 0, 0): 17}
    calls = [(2, 11, 5, 31), (3, 24, 7, 20), (4, 60, 9, 8), (7, 33, 2, 6), (5, 9, 3, 14), (6, 17, 4, 3)]
    basis = Basis(calls)
    found = basis.fit(tuple(value_of(terms, call) for call in calls))
    assert found(basis.products((9, 100, 11, 3))) == value_of(terms, (9, 100, 11, 3))


@settings(max_examples=40)
@given(st.data())
def test_what_is_found_gives_the_numbers_it_was_found_from(data):
    """Whatever they are."""
    num_symbols = data.draw(st.integers(1, 3))
    calls = calls_of(data.draw, num_symbols, data.draw(st.integers(3, 6)))
    column = tuple(data.draw(st.lists(st.integers(-50, 50), min_size=len(calls), max_size=len(calls))))
    basis = Basis(calls)
    found = basis.fit(column)
    assert found is None or tuple(found(basis.products(call)) for call in calls) == column


@given(st.integers(2, 64), st.lists(SIZES, min_size=6, max_size=6, unique=True), st.data())
def test_a_length_that_is_rounded_up_is_refuted_by_a_call_more(window, lengths, data):
    def rounded(n):
        return -(-n // window) * window

    calls = [(n,) for n in lengths]
    basis = Basis(calls)
    found = basis.fit(tuple(rounded(n) for n in lengths))
    other = data.draw(SIZES.filter(lambda n: n not in lengths))
    if found is None or found(basis.products((other,))) == rounded(other):
        return
    more = Basis([*calls, (other,)])
    again = more.fit(tuple(rounded(n) for n in [*lengths, other]))
    assert again is None or again(more.products((other,))) == rounded(other)


def test_a_length_that_is_rounded_up_follows_no_rule():
    calls = [(n,) for n in (11, 24, 60, 37, 18)]
    assert Basis(calls).fit(tuple(-(-n // 16) * 16 for (n,) in calls)) is None


@given(st.lists(SIZES, min_size=6, max_size=6, unique=True), st.integers(0, 2**32))
def test_random_numbers_follow_no_rule(lengths, seed):
    random = Random(seed)
    column = tuple(random.randrange(1, 10**9) for _ in lengths)
    assert Basis([(n,) for n in lengths]).fit(column) is None


@given(st.lists(SIZES, min_size=3, max_size=5, unique=True), st.integers(2, 8), SIZES)
def test_a_fraction_of_a_size_is_a_whole_number_or_none(halves, divisor, other):
    calls = [(n * divisor,) for n in halves]
    basis = Basis(calls)
    found = basis.fit(tuple(halves))
    assert found is not None
    got = found(basis.products((other,)))
    assert got == other // divisor if other % divisor == 0 else got is None


@given(st.data())
def test_as_many_terms_as_calls_are_not_believed(data):
    """Any numbers are a sum of as many products: a call has to be left that could have told otherwise."""
    num_terms = data.draw(st.integers(2, MOST_TERMS))
    calls = calls_of(data.draw, 2, num_terms)
    column = tuple(data.draw(st.lists(st.integers(1, 10**6), min_size=num_terms, max_size=num_terms, unique=True)))
    found = Basis(calls).fit(column)
    assert found is None or len(found.terms) < num_terms


@given(st.data())
def test_a_polynomial_is_of_the_fewest_terms(data):
    num_symbols, terms = data.draw(sums(2, 1))
    calls = calls_of(data.draw, num_symbols, 5)
    found = Basis(calls).fit(tuple(value_of(terms, call) for call in calls))
    assert len(found.terms) == 1


def test_zero_is_a_polynomial_too():
    basis = Basis([(3,), (4,), (9,)])
    assert basis.fit((0, 0, 0))(basis.products((7,))) == 0
    assert Polynomial(())([1, 2]) == 0


def test_sizes_that_follow_from_others_are_no_symbols():
    calls = [(b, s, 32, b * s, 2 * s + 1) for b, s in ((2, 11), (3, 24), (5, 60), (4, 7))]
    assert independent(calls) == (0, 1)


@given(st.data())
def test_sizes_that_are_drawn_by_themselves_are_symbols(data):
    num_symbols = data.draw(st.integers(1, 3))
    calls = calls_of(data.draw, num_symbols, 6)
    columns = list(zip(*calls, strict=True))
    found = independent(calls)
    assert found[0] == 0
    basis = Basis([tuple(call[place] for place in found) for call in calls])
    assert all(basis.fit(column) is not None for column in columns)


def test_sizes_that_fall_together_are_one_until_a_call_shows_that_they_are_two():
    calls = [(2, 11, 11), (3, 24, 24), (4, 60, 60)]
    assert independent(calls) == (0, 1)
    assert independent([*calls, (4, 60, 13)]) == (0, 1, 2)


def test_too_many_sizes_are_no_family():
    calls = [tuple(pow(7 + place, call + 2, 997) + call for place in range(MOST_SYMBOLS + 1)) for call in range(9)]
    assert independent(calls) is None


@given(st.data())
def test_factors_are_found_exactly(data):
    size = data.draw(st.integers(1, 3))
    entries = st.lists(st.integers(1, 10**6), min_size=size + 2, max_size=size + 2)
    columns = [tuple(data.draw(entries)) for _ in range(size)]
    factors = tuple(data.draw(st.lists(st.integers(-999, 999), min_size=size, max_size=size)))
    wanted = tuple(sum(f * n for f, n in zip(factors, row, strict=True)) for row in zip(*columns, strict=True))
    assert _solve(columns, wanted) in (factors, None)


@given(st.lists(st.integers(1, 999), min_size=4, max_size=4), st.integers(1, 9))
def test_factors_of_columns_that_are_multiples_are_not_guessed(column, multiple):
    columns = [tuple(column), tuple(multiple * n for n in column)]
    assert _solve(columns, tuple(3 * n for n in column)) is None


@given(st.lists(st.integers(1, 999), min_size=3, max_size=3, unique=True))
def test_a_fraction_is_no_factor(column):
    assume(any(n % 2 for n in column))
    assert _solve([tuple(2 * n for n in column)], tuple(column)) is None
