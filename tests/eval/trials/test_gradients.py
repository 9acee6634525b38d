"""Gradients of a batch, and the distance between two of them."""

import math

import pytest
import torch

from adacc_hf.eval.records.records import WrongResultError
from adacc_hf.eval.trials.gradients import Gradients, checked_error, compute_gradients, first_difference, relative_error
from adacc_hf.eval.trials.model_under_test import Subject


def gradients(loss: float, **by_name: list[float]) -> Gradients:
    return Gradients(torch.tensor(loss), {name: torch.tensor(values) for name, values in by_name.items()})


def test_same_seed_gives_equal_gradients_and_leaves_none() -> None:
    subject = Subject(preset="demo", batch=1, tokens=16)
    model, batch = subject.model(), subject.example()
    gradients_of_seed, same, other_seed = (compute_gradients(model, batch, seed) for seed in (0, 0, 1))
    assert first_difference(gradients_of_seed, same) is None
    assert first_difference(gradients_of_seed, other_seed) == "the loss"  # dropout differs
    assert gradients_of_seed.by_name.keys() == dict(model.named_parameters()).keys()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_first_difference_names_it() -> None:
    base = gradients(1.0, a=[1.0], b=[2.0])
    assert first_difference(base, gradients(1.0, a=[1.0], b=[2.5])) == "b"
    assert first_difference(base, gradients(1.5, a=[1.0], b=[2.0])) == "the loss"
    assert first_difference(base, gradients(1.0, a=[1.0])) == "the set of parameters with a gradient"


def test_relative_error_is_of_the_whole_vector() -> None:
    expected, nearby = gradients(1.0, a=[3.0], b=[4.0, 0.0]), gradients(1.0, a=[3.0], b=[4.0, 0.5])
    # |(0, 0, 0.5)| / |(3, 4, 0)|; every number here is exact in binary.
    assert relative_error(expected, nearby) == pytest.approx(0.1, rel=1e-12)
    assert relative_error(expected, expected) == 0.0
    assert relative_error(expected, gradients(1.0, a=[3.0])) == math.inf


@pytest.mark.parametrize(
    ("error", "is_lossy", "is_accepted"),
    [(3e-4, False, True), (5e-4, False, False), (0.4, True, True), (0.6, True, False), (math.nan, True, False)],
)
def test_an_error_beyond_the_noise_needs_lossy_codecs(error: float, is_lossy: bool, is_accepted: bool) -> None:
    """The noise of a GPU's plain runs, which add in another order, is no error of a method."""
    expected, actual = gradients(1.0, w=[1.0, 0.0]), gradients(1.0, w=[1.0, error])
    options = {"noise": 1e-4, "rounding": 0.0, "is_lossy": is_lossy, "label": "other"}
    if is_accepted:
        assert checked_error(expected, actual, **options) == pytest.approx(error, rel=1e-3)
    else:
        with pytest.raises(WrongResultError, match=r"other: w differs: .* allowed 0\.\d+; of the loss 0"):
            checked_error(expected, actual, **options)
