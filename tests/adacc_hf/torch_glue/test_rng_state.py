"""States of the default generators: read, drawn from, and restored."""

import pytest
import torch

from adacc_hf.torch_glue.rng_state import draw_from_state, generator_state, replace_generators

CPU = torch.device("cpu")


def test_what_is_drawn_from_a_state_is_what_was_drawn_after_it_and_the_generator_is_put_back():
    torch.manual_seed(3)
    state = generator_state(CPU)
    numbers = torch.rand(5)
    later = torch.get_rng_state()
    with draw_from_state(state, CPU):
        assert torch.equal(torch.rand(5), numbers)
    assert torch.equal(torch.get_rng_state(), later)
    with pytest.raises(RuntimeError, match="shape"), draw_from_state(state, CPU):
        (torch.rand(2) + torch.rand(2)).view(3)
    assert torch.equal(torch.get_rng_state(), later)


def test_a_state_is_a_storage_of_its_own():
    """A state has its own storage, which counts as a block's stored bytes."""
    one, other = generator_state(CPU), generator_state(CPU)
    assert one.data_ptr() != other.data_ptr()
    assert one.untyped_storage().nbytes() == one.nbytes == torch.get_rng_state().nbytes


def test_a_gpus_state_is_that_of_its_own_generator(monkeypatch):
    generators = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name, generator in (("cuda:0", generators[0]), ("cuda:1", generators[1]), ("cuda", generators[1])):
        assert torch.equal(generator_state(torch.device(name)), generator.get_state())


def test_other_devices_have_none_and_imitated_ones_what_stands_for_it():
    assert generator_state(torch.device("meta")) is None
    with replace_generators({"meta": torch.Generator().manual_seed(4)}):
        assert generator_state(torch.device("meta")) is not None
        assert generator_state(CPU) is None
    assert generator_state(torch.device("meta")) is None
    assert generator_state(CPU) is not None
