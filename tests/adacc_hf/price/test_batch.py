"""The profiled batch, and the arguments of `profile_model` that describe the step around it."""

from dataclasses import fields
from inspect import signature

import pytest
import torch

from adacc_hf import profile_model
from adacc_hf.price.batch import Batch, TrainingStep

FIELDS = {field.name: field.default for field in fields(TrainingStep)}


def test_tensors_of_a_graph_are_detached():
    """A backward through the batch's tensors, also nested ones, frees no graph outside. Other tensors are unchanged."""
    ids, leaf = torch.arange(6).view(2, 3), torch.ones(2, 3, requires_grad=True)
    computed = leaf.sin()
    batch = Batch({"input_ids": ids, "leaf": leaf, "encoder_outputs": (computed, None)})
    assert batch.tensors["input_ids"] is ids
    assert batch.tensors["leaf"] is leaf
    detached = batch.tensors["encoder_outputs"][0]
    assert detached.is_leaf
    assert detached.requires_grad
    assert detached.data_ptr() == computed.data_ptr()
    detached.exp().sum().backward()
    computed.sum().backward()
    assert torch.equal(leaf.grad, leaf.cos())


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
