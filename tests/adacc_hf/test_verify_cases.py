"""The cases of `adacc verify --methods` are small and distinct, and plain training repeats them bit for bit."""

import inspect
import re

import pytest
import torch

from adacc_hf.verify_cases import CASES, Model
from adacc_hf.verify_methods import METHODS, compared, train


def test_the_cases_are_small_and_distinct():
    assert len(CASES) == len({case.make for case in CASES.values()}) == 20
    for case in CASES.values():
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", case.thread)
        model = case.make()
        own = [type(model.blocks[0]).forward, type(model.blocks[0]).build]
        assert max(len(inspect.getsource(each).splitlines()) for each in own) <= 12
        assert isinstance(model, Model)


@pytest.mark.parametrize("name", CASES)
def test_plain_training_is_repeatable(name, one_thread):
    """Training changes each trained weight, and a second training is bit-equal."""
    tensors = train(CASES[name], METHODS["plain"])
    gradients = [
        tensor for name, tensor in tensors.items() if name.startswith("step 3: gradient") and tensor is not None
    ]
    assert gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert compared(CASES[name], "plain", tensors) == {"status": "measured", "differs": "", "relative_error": 0.0}
