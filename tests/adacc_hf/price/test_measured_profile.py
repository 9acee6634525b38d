"""Measured profiles: the same for the same batch, whatever is around the model."""

import copy

import torch

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import uniform_policy

CONFIG = AdaccConfig(min_compress_bytes=0)


def test_the_same_batch_gives_the_same_profile_but_for_times(tiny_gpt2, token_batch):
    def without_times(profile):
        return [
            [
                (v.index, v.name, v.nbytes, v.recomputable, [(c.codec, c.nbytes, c.error) for c in v.codecs])
                for v in k.values
            ]
            + [k.digest, k.slots]
            for k in profile.kinds
        ]

    model, batch = tiny_gpt2(), token_batch()
    first, second = profile_model(model, batch, CONFIG), profile_model(model, batch, CONFIG)
    assert without_times(first) == without_times(second)
    assert first.plain_stored_bytes == second.plain_stored_bytes
    assert first.static_bytes == second.static_bytes


def test_the_optimizers_state_is_static_memory(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    without, with_state = profile_model(model, batch, CONFIG), profile_model(model, batch, CONFIG, optimizer)
    parameters = sum(p.nbytes for p in model.parameters())
    counts = 4 * len(list(model.parameters()))
    assert with_state.static_bytes - without.static_bytes == 2 * parameters + counts


def test_no_grad_outside_does_not_matter(tiny_gpt2, token_batch, gpt2_profile):
    with torch.no_grad():
        profile = profile_model(tiny_gpt2(layers=3), token_batch(), CONFIG)
    assert profile.kinds[0].digest == gpt2_profile.kinds[0].digest


def test_frozen_blocks_are_profiled(tiny_gpt2, token_batch, run_steps, assert_same_steps):
    """Frozen blocks are profiled, as in fine-tuning of the last layers. The first block saves nothing."""
    model, batch = tiny_gpt2(layers=3), token_batch()
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    plain = run_steps(model, batch)
    profile = profile_model(model, batch, CONFIG)
    frozen = profile.kind_of(profile.blocks[0])
    assert not [value for value in frozen.activations if value.saved]
    with apply_policy(model, uniform_policy(profile, "recompute")):
        assert_same_steps(run_steps(model, batch), plain)


def test_a_copy_has_the_same_profile(tiny_gpt2, token_batch, gpt2_profile):
    profile = profile_model(copy.deepcopy(tiny_gpt2(layers=3)), token_batch(), CONFIG)
    assert [kind.digest for kind in profile.kinds] == [kind.digest for kind in gpt2_profile.kinds]
