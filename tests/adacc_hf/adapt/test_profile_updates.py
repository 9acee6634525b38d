"""A codec that is switched off at one batch size is off at every size, and for no other activation."""

from __future__ import annotations

import pytest
from profile_builders import in_all_blocks

from adacc_hf import AdaccConfig, profile_model
from adacc_hf.adapt.corrections import without_codecs

CONFIG = AdaccConfig(min_compress_bytes=0)


@pytest.fixture(scope="module")
def profiles(tiny_gpt2, token_batch):
    """Profiles of one model at two sizes. Eager attention clones four times: queries, keys, values and its result."""
    model = tiny_gpt2("eager", attn_pdrop=0.0)
    return [profile_model(model, token_batch(tokens=tokens), CONFIG) for tokens in (12, 7)]


def clones(profile):
    return [value for value in profile.kinds[0].values if value.name == "attn:clone"]


def test_one_of_four_activations_of_a_name_is_told_from_the_others_at_every_size(profiles):
    queries, keys, values, result = clones(profiles[0])
    assert [value.role for value in (queries, keys, values, result)] == ["qkv"] * 3 + ["linear"]
    switched_off = in_all_blocks(profiles[0], {(0, keys.index, "channel_int4")})
    blocks = ["transformer.h.0", "transformer.h.1"]
    assert switched_off == {(block, "attn:clone#2", "channel_int4") for block in blocks}
    for profile in profiles:
        remaining_profile = without_codecs(profile, switched_off)
        others = [value for value in profile.kinds[0].values if value.index != clones(profile)[1].index]
        assert clones(remaining_profile)[1].codecs == ()
        assert [remaining_profile.kinds[0].values[value.index] for value in others] == others


def test_what_is_switched_off_in_one_block_is_so_for_its_kind(profiles):
    profile, _ = profiles
    assert not clones(without_codecs(profile, {("transformer.h.1", "attn:clone", "channel_int4")}))[0].codecs
    assert without_codecs(profile, {("transformer.h.9", "attn:clone", "channel_int4")}) == profile
    assert without_codecs(profile, {("transformer.h.1", "attn:clone", "int8")}) == profile
