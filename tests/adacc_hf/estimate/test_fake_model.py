"""Traces of a fake model."""

from transformers import GPT2Config

from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload, fake_model
from adacc_hf.estimate.static_memory import PRECISIONS

GPT2 = GPT2Config(n_layer=6, n_embd=64, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)


def test_equal_blocks_that_run_different_operators_are_all_traced() -> None:
    workload = Workload(config=GPT2, device=find_device("h100"), precision=PRECISIONS["fp32"])
    with fake_model(workload) as model:
        block = model.blocks[4]
        block.forward = lambda states, *args, **kwargs: type(block).forward(block, states.exp(), *args, **kwargs)
        assert model.thinning.gaps
        profile = model.profile(2, 32)
        assert not model.thinning.gaps
    assert [block.name for block in profile.blocks] == model.block_names
