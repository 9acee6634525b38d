"""TrainingStep: the arguments of `profile_model` that describe the step around a micro-batch."""

from dataclasses import fields
from inspect import signature

import pytest
import torch

from adacc_hf import profile_model
from adacc_hf.price.training_step import TrainingStep

FIELDS = {field.name: field.default for field in fields(TrainingStep)}


class UnpredictableSGD(torch.optim.SGD):
    """Optimizer that can step on the model's own parameters only."""

    def step(self, closure=None):
        raise RuntimeError("not these parameters")


def test_every_field_is_an_argument_of_profile_model_with_the_same_default():
    parameters = signature(profile_model).parameters
    assert {name: parameters[name].default for name in FIELDS} == FIELDS


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("gradient_accumulation_steps", 1),
        ("prefetched_batches", 0),
        ("optimizer_step_bytes", 0),
        ("optimizer_state_bytes", 0),
    ],
)
def test_numbers_have_a_minimum(name, minimum):
    TrainingStep(**{name: minimum}).check()
    for value in (minimum - 1, True, 1.0):
        with pytest.raises(ValueError, match=f"{name}={value} must be an int of at least {minimum}"):
            TrainingStep(**{name: value}).check()


def test_other_batches_are_the_other_micro_batches_and_the_prefetched_ones():
    assert TrainingStep().other_batches_bytes(100) == 0
    assert TrainingStep(gradient_accumulation_steps=4, prefetched_batches=2).other_batches_bytes(100) == 500
