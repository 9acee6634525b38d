"""Fake tensors: the decisions of a device that is not there, and the meter of their bytes."""

import torch
from fake_profiles import gpt2, profile_on_cuda

from adacc_hf.estimate.fake_device import FakeMemoryMeter, fake_tensors
from adacc_hf.tape.replay import view
from adacc_hf.tape.tape import TensorRef
from adacc_hf.torch_glue.tensors import copy_with_storage


def test_tensors_on_cuda_take_the_decisions_of_cuda() -> None:
    """Fake CUDA tensors follow CUDA: float32 `pow` under autocast, a boolean dropout mask, one attention operator."""
    with fake_tensors("cuda"):
        fake = profile_on_cuda(gpt2(64, 2))
    (kind,) = fake.kinds
    assert {value.dtype for value in kind.activations if "dropout" in value.name and value.saved} == {"bool"}
    assert "attn:scaled_dot_product_flash_attention" in {value.name for value in kind.values}
    assert any(value.dtype == "float32" and value.name.startswith("mlp.act") for value in kind.activations)


def test_all_of_torch_is_replayed_and_random_operators_from_states_that_take_no_memory() -> None:
    with fake_tensors("cuda"):
        (kind,) = profile_on_cuda(gpt2(64, 2)).kinds
    assert all(operator.replayable for operator in kind.operators)
    states = {value.index for value in kind.values if value.is_generator_state}
    rng_use = [operator.name for operator in kind.operators if not states.isdisjoint(operator.inputs)]
    dropout, attention = "aten.native_dropout.default", "aten._scaled_dot_product_flash_attention.default"
    assert rng_use == [attention, dropout, dropout]
    assert not any(kind.values[state].nbytes for state in states)


def test_a_copy_of_a_storage_is_counted_until_it_dies() -> None:
    """A copy of a storage counts until it dies: torch's mode keeps arguments, and replay copies (rule R6)."""
    with fake_tensors("cpu"), FakeMemoryMeter() as meter:
        original = torch.empty(64, 64)
        copy = copy_with_storage(original)
        viewed = view(copy, TensorRef(0, ((64, 32), (32, 1), 0), torch.float64))
        del original, copy, viewed
        meter.mark(("end",))
    assert meter.points[-1].live_bytes == 0


def test_an_inner_meter_stops_the_peaks_of_the_outer_one() -> None:
    """What a recorded step measures aside is no part of the step's peaks."""
    with fake_tensors("cpu"), FakeMemoryMeter() as outer:
        with FakeMemoryMeter() as inner:
            kept = torch.empty(1000, dtype=torch.uint8)
            torch.empty(5000, dtype=torch.uint8)
        outer.mark(("end",))
        del kept
    assert inner.peak_bytes == 6000
    assert outer.peak_bytes == outer.points[-1].live_bytes == 1000
