"""The measured step in parts: events of a block's forward and backward, and other live bytes."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import CallMarks, unwinds
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step
from adacc_hf.torch_glue.meters import MemoryPoint

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_backward_asks_for_each_slot_once_and_lets_it_go_after(gpt2_profile):
    (kind,) = gpt2_profile.kinds
    slots = range(len(kind.slots))
    unpacked = [event.slot for event in kind.backward if not event.release]
    released = [event.slot for event in kind.backward if event.release]
    assert sorted(unpacked) == sorted(released) == list(slots)
    order = [(event.slot, event.release) for event in kind.backward]
    assert all(order.index((slot, False)) < order.index((slot, True)) for slot in slots)
    assert all(event.entry_bytes <= event.extra_bytes for event in kind.backward)


def test_forward_starts_with_the_block_and_frees_only_what_was_saved(gpt2_profile):
    (kind,) = gpt2_profile.kinds
    start, *rest = kind.forward
    assert (start.value, start.death) == (-1, False)
    packed = [event.value for event in rest if not event.death]
    died = [event.value for event in rest if event.death]
    assert sorted(packed) == sorted({value for value in kind.slots if value >= 0})
    assert set(died) <= set(packed)
    assert len(died) == len(set(died))
    assert all(event.extra_bytes >= 0 for event in kind.forward)


def test_gradients_gather_from_the_last_block_to_the_first(gpt2_profile, tiny_gpt2):
    """Gradients accumulate from the last block to the first. When a block's backward starts, gradients of all later
    blocks are live. Scalars that their operators held as tensors of 8 bytes are gone: a handful per block."""
    bases = [block.backward_base_bytes for block in gpt2_profile.blocks]
    block_bytes = sum(p.nbytes for p in tiny_gpt2().transformer.h[0].parameters())
    for earlier, later in pairwise(bases):
        assert earlier - later == pytest.approx(block_bytes, abs=64)
    assert gpt2_profile.static_bytes < bases[-1]


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    frozen=st.lists(st.booleans(), min_size=2, max_size=4),
    is_inlet_frozen=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_peaks_are_as_predicted_whichever_blocks_are_frozen(
    tiny_gpt2, token_batch, run_steps, peak_of, frozen, is_inlet_frozen, seed
):
    model, batch = tiny_gpt2(layers=len(frozen)), token_batch(4, 24)
    for block, is_frozen in zip(model.transformer.h, frozen, strict=True):
        block.requires_grad_(not is_frozen)
    for embedding in (model.transformer.wte, model.transformer.wpe):  # the first is the head too
        embedding.requires_grad_(not is_inlet_frozen)
    model.transformer.ln_f.requires_grad_(True)
    profile = profile_model(model, batch, CONFIG)
    for policy in (uniform_policy(profile, "recompute"), random_policy(profile, seed)):
        with apply_policy(model, policy, CONFIG):
            run_steps(model, batch, num_steps=2)
            step_memory = measure_step(model, batch)
        assert step_memory.stored_bytes == policy.predicted_stored_bytes
        assert step_memory.peak_bytes == peak_of(policy)


def test_casts_in_autocasts_cache_are_told(tiny_gpt2, token_batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = profile_model(tiny_gpt2(), token_batch(), CONFIG)
    cached = {value.name for kind in profile.kinds for value in kind.values if value.cached}
    assert cached
    assert all(value.role == "parameter" for kind in profile.kinds for value in kind.values if value.cached)


# Marks that a block's call sets in a memory meter.


class Labels:
    def __init__(self):
        self.labels = []

    def mark(self, label):
        self.labels.append(label)


def test_forward_backward_and_tail_are_marked():
    meter = Labels()
    marks = CallMarks(meter, Measurement())
    inlet, block = nn.Linear(3, 3), nn.Linear(3, 3)
    for _ in range(2):
        meter.labels.clear()
        hidden = inlet(torch.ones(2, 3))
        for name in "ab":
            hidden = marks.run(name, partial(block, hidden), (hidden,), is_first=name == "a")
        hidden.sum().backward()
        forward = [("enter", "a"), ("leave", "a"), ("enter", "b"), ("leave", "b")]
        assert meter.labels == [*forward, ("backward", "b"), ("backward", "a"), ("tail", "a")]


def test_frozen_blocks_have_no_backward():
    meter = Labels()
    block = nn.Linear(3, 3).requires_grad_(False)
    rows = torch.ones(2, 3)
    CallMarks(meter, Measurement()).run("a", partial(block, rows), (rows,), is_first=True)
    assert meter.labels == [("enter", "a"), ("leave", "a")]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("+a +b -b -a", True),
        ("+a +b -b -a +c +d -d -c", True),
        ("+frozen +a +b -b -a", True),
        ("+a +b +c +d -d -c -b -a", True),
        ("+a +b +c +d -b -a -d -c", False),
        ("+a +b -b -a -b -a", False),
    ],
)
def test_backwards_in_the_reverse_order_of_forwards(events, expected):
    labels = [("start",), *(("enter" if event[0] == "+" else "backward", event[1:]) for event in events.split())]
    assert unwinds([MemoryPoint(label, 0, 0) for label in labels]) == expected
