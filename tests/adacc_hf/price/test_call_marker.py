"""Marks that a block's call sets in a memory meter."""

import torch
from torch import nn

from adacc_hf.price.call_marker import CallMarker
from adacc_hf.price.measurement import Measurement
from adacc_hf.run.blocks import PlainStrategy


class Labels:
    def __init__(self):
        self.labels = []

    def mark(self, label):
        self.labels.append(label)


def test_forward_backward_and_tail_are_marked():
    meter, trained_calls = Labels(), set()
    first, second = (
        CallMarker(name, PlainStrategy(), meter, Measurement(), is_first=name == "a", trained_calls=trained_calls)
        for name in "ab"
    )
    inlet, block = nn.Linear(3, 3), nn.Linear(3, 3)
    for _ in range(2):
        meter.labels.clear()
        hidden = inlet(torch.ones(2, 3))
        for marker in (first, second):
            hidden = marker.run(block, block, (hidden,), {})
        hidden.sum().backward()
        forward = [("enter", "a"), ("leave", "a"), ("enter", "b"), ("leave", "b")]
        assert meter.labels == [*forward, ("backward", "b"), ("backward", "a"), ("tail", "a")]


def test_frozen_blocks_have_no_backward():
    meter = Labels()
    block = nn.Linear(3, 3).requires_grad_(False)
    CallMarker("a", PlainStrategy(), meter, Measurement(), is_first=True, trained_calls=set()).run(
        block, block, (torch.ones(2, 3),), {}
    )
    assert meter.labels == [("enter", "a"), ("leave", "a")]
