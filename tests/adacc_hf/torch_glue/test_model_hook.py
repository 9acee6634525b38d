"""ModelHook and the names of a call's arguments."""

import copy
import pickle

import pytest
import torch
from torch import nn

from adacc_hf.torch_glue.model_hook import ModelHook, by_name


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copied_model_has_a_hook_that_does_nothing(copied):
    calls = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(ModelHook(lambda *args: calls.append(args)))
    copied(model)(torch.ones(1, 2))
    assert calls == []
    model(torch.ones(1, 2))
    assert len(calls) == 1


class Named(nn.Module):
    def forward(self, ids, mask=None, *, labels=None):
        return ids


class Open(nn.Module):
    def forward(self, ids, *others, **options):
        return ids


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "expected"),
    [
        (Named(), (1,), {"labels": 2}, {"ids": 1, "labels": 2}),
        (Named(), (1, 2), {}, {"ids": 1, "mask": 2}),
        (Named(), (), {"ids": 1}, {"ids": 1}),
        (Named(), (1, 2, 3, 4), {}, None),
        (Open(), (1,), {"mask": 2}, {"ids": 1, "mask": 2}),
        (Open(), (1, 2), {}, None),
    ],
)
def test_arguments_by_name(module, args, kwargs, expected):
    assert by_name(module, args, kwargs) == expected
