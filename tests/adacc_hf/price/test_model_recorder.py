"""ModelRecorder: the kinds of a model's blocks, and the tensors that blocks share."""

import pytest
import torch

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.price.model_recorder import recompute_outcome

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.fixture(scope="module")
def gpt2_profile(tiny_gpt2, token_batch):
    return profile_model(tiny_gpt2(layers=3), token_batch(), CONFIG)


def test_like_blocks_are_one_kind(gpt2_profile):
    assert gpt2_profile.model_class == "GPT2LMHeadModel"
    assert [block.name for block in gpt2_profile.blocks] == [f"transformer.h.{i}" for i in range(3)]
    assert [block.kind for block in gpt2_profile.blocks] == [0, 0, 0]
    (kind,) = gpt2_profile.kinds
    assert kind.block_class == "GPT2Block"
    assert gpt2_profile.device == "cpu"


def test_unlike_blocks_are_kinds_of_their_own(toy_model, toy_batch):
    def setup(block):
        block.steep = len(kinds)
        kinds.append(block)

    def forward(block, hidden):
        x = block.up(hidden)
        return hidden + block.down(x.tanh() if block.steep % 2 else x.sigmoid())

    kinds = []
    profile = profile_model(toy_model(forward, num_blocks=4, setup=setup), toy_batch(), CONFIG)
    assert [block.kind for block in profile.blocks] == [0, 1, 0, 1]
    assert len(profile.kinds) == 2


def test_what_a_gpt2_block_saves(gpt2_profile):
    kind = gpt2_profile.kinds[0]
    hidden = 2 * 12 * 32 * 4
    by_name = {value.name: value for value in kind.activations}
    assert by_name["argument 0"].nbytes == hidden
    assert not by_name["argument 0"].recomputable
    assert by_name["mlp.act:tanh"].nbytes == 4 * hidden
    masks = [value for value in kind.activations if value.role == "mask"]
    assert len(masks) == 3
    assert all(value.recomputable for value in kind.activations if value.producer is not None)
    states = [value for value in kind.values if value.is_generator_state]
    assert len(states) == len(masks)
    assert kind.forward_ms == pytest.approx(sum(operator.ms for operator in kind.operators))
    assert all(operator.ms > 0 for operator in kind.operators if operator.replayable)
    assert recompute_outcome(kind).stored_bytes == hidden + len(states) * torch.get_rng_state().nbytes


def test_the_mask_is_shared_by_all_blocks(tiny_gpt2, token_batch):
    batch = token_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -2:] = 0
    profile = profile_model(tiny_gpt2("eager", layers=3), batch, CONFIG)
    masks = [shared for shared in profile.shared if shared.nbytes >= 2 * 12 * 12]
    assert len(masks) == 1
    used_shared_tensors = {value.shared for kind in profile.kinds for value in kind.values if value.shared is not None}
    assert profile.shared.index(masks[0]) in used_shared_tensors
