"""Kinds of a recorded forward."""

from adacc_hf import AdaccConfig, profile_model

CONFIG = AdaccConfig(min_compress_bytes=0)


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
