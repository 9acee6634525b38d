"""Traces of a fake model."""

import pytest
from transformers import GPT2Config

from adacc_hf import AdaccConfig
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload, fake_model
from adacc_hf.estimate.planning import plain_ms
from adacc_hf.estimate.static_memory import PRECISIONS

GPT2 = GPT2Config(n_layer=6, n_embd=64, n_head=4, n_positions=4096, vocab_size=500, bos_token_id=0, eos_token_id=0)


def test_equal_blocks_that_run_different_operators_are_all_traced() -> None:
    workload = Workload(config=GPT2, device=find_device("h100"), precision=PRECISIONS["fp32"])
    with fake_model(workload) as model:
        block = model.blocks[4]
        block.forward = lambda states, *args, **kwargs: type(block).forward(block, states.exp(), *args, **kwargs)
        assert model.thinning.gaps
        profile = model.profile(2, 32)
        assert not model.thinning.gaps
    assert [block.name for block in profile.blocks] == model.block_names


def test_a_plain_step_takes_no_time_for_tiles() -> None:
    """Tiles are recorded in a second step, which is not timed."""
    times = []
    for actions in (("retain", "recompute", "tile"), ("retain", "recompute")):
        settings = AdaccConfig(actions=actions)
        workload = Workload(config=GPT2, device=find_device("h100"), precision=PRECISIONS["fp32"], adacc=settings)
        with fake_model(workload) as model:
            profile = model.profile(1, 4096)
        assert (profile != profile.untiled) == ("tile" in actions)
        times.append(plain_ms(profile))
    assert times[0] == pytest.approx(times[1])
