"""The error of a gradient against its definition, on tensors of any number and layout, and where it is undefined."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.adapt.gradient_check import gradient_error


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5),
    scale=st.sampled_from([1e-18, 1.0, 1e18]),
    noise=st.sampled_from([0.0, 1e-6, 0.1, 3.0]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_the_error_is_that_of_all_gradients_as_one_vector(sizes, scale, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    exact = [torch.randn(size, generator=generator).t() * scale for size in sizes]
    other = [e + torch.randn(e.shape, generator=generator) * noise * scale for e in exact]
    e, o = (torch.cat([t.reshape(-1) for t in tensors]).double() for tensors in (exact, other))
    # Double precision, summed in another order.
    expected = float((o - e).norm() / e.norm())
    assert math.isclose(gradient_error([*exact, None], [*other, None]), expected, rel_tol=1e-12)


@pytest.mark.parametrize("exact", [[], [None], [torch.zeros(3)], [torch.tensor([1.0, math.nan])]])
def test_a_gradient_that_is_zero_or_not_finite_anyway_says_nothing(exact):
    assert gradient_error(exact, [None if e is None else torch.ones_like(e) for e in exact]) is None


@pytest.mark.parametrize("degraded", [math.nan, math.inf])
def test_a_gradient_that_only_compression_makes_non_finite_is_infinitely_wrong(degraded):
    other = [torch.ones(2), torch.tensor([1.0, degraded, 1.0])]
    assert gradient_error([torch.ones(2), torch.ones(3)], other) == math.inf
