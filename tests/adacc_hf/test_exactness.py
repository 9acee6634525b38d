"""Rule R1 on GPT-2 and LLaMA: under every lossless policy, loss and gradients are bit-equal to plain training's."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step

SETTINGS = [
    pytest.param(("gpt2", "sdpa", 3, None), id="sdpa-fp32"),
    pytest.param(("gpt2", "sdpa", 2, torch.bfloat16), id="sdpa-bf16"),
    pytest.param(("gpt2", "eager", 2, None), id="eager-fp32"),
    pytest.param(("gpt2", "eager", 4, torch.bfloat16), id="eager-bf16"),
    pytest.param(("llama", "eager", 2, torch.bfloat16), id="llama-bf16"),
]
"""Model, attention, layers, autocast."""


@pytest.fixture(scope="module", params=SETTINGS)
def plain_training(request, tiny_gpt2, tiny_llama, token_batch, run_steps):
    """(model, batch, autocast, its profile, three steps of plain training)."""
    name, attention, layers, autocast = request.param
    build = {"gpt2": tiny_gpt2, "llama": partial(tiny_llama, attention_dropout=0.1)}[name]
    model, batch = build(attention, layers), token_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0))
    return model, batch, autocast, profile, run_steps(model, batch, autocast=autocast)


# 50 examples for each of the five settings, 250 policies in total. The fixtures outlive an example but do not change:
# weights stay, and gradients are dropped.
@settings(max_examples=34, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_random_lossless_policies_train_exactly(plain_training, run_steps, assert_same_steps, seed):
    model, batch, autocast, profile, plain = plain_training
    policy = random_policy(profile, seed, ("retain", "recompute", "compress"), lossless=True)
    with apply_policy(model, policy):
        # The first step is recorded, the second guesses the order of backward, the third has learned it.
        assert_same_steps(run_steps(model, batch, autocast=autocast), plain)


@pytest.mark.parametrize("seed", range(4))
def test_random_policies_store_what_they_predict(plain_training, run_steps, seed):
    model, batch, autocast, profile, _ = plain_training
    policy = random_policy(profile, seed, ("retain", "recompute", "compress"))
    with apply_policy(model, policy):
        run_steps(model, batch, num_steps=2, autocast=autocast)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
            assert measure_step(model, batch).stored_bytes == policy.predicted_stored_bytes


def test_a_lossy_policy_changes_the_gradients(plain_training, run_steps):
    """A lossy policy changes the gradients, which shows that the comparison detects 8-bit and 4-bit activations."""
    model, batch, autocast, profile, plain = plain_training
    with apply_policy(model, uniform_policy(profile, "compress")):
        lossy = run_steps(model, batch, num_steps=1, autocast=autocast)
    assert torch.equal(lossy[0]["loss"], plain[0]["loss"])
    assert any(not torch.equal(lossy[0][name], plain[0][name]) for name in plain[0])
