"""Masks redrawn in backward (rule R5) are bit-equal to forward's, and the stored bytes are as predicted."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.artifacts.policy import RECOMPUTE, RETAIN, Plan
from adacc_hf.solve.simple_policies import policy_of_plans, random_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0)
FAMILIES = ["gpt2-eager", "gpt2-sdpa", "llama-eager", "t5-eager", "bert-eager", "bert-sdpa"]


def t5(attention):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "use_cache": False}
    return T5ForConditionalGeneration(T5Config(vocab_size=61, attn_implementation=attention, **sizes, **ends))


def bert(attention):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=61, attn_implementation=attention, **sizes))


@pytest.fixture(scope="module", params=FAMILIES)
def plain_training(request, tiny_gpt2, tiny_llama, token_batch, run_steps):
    """(model with dropout, its batch, its profile, three steps of plain training)."""
    name, attention = request.param.split("-")
    torch.manual_seed(0)
    builders = {
        "gpt2": tiny_gpt2,
        "llama": lambda attention: tiny_llama(attention, attention_dropout=0.1),
        "t5": t5,
        "bert": bert,
    }
    model, batch = builders[name](attention).train(), token_batch()
    return model, batch, profile_model(model, batch, CONFIG), run_steps(model, batch)


def masks_of(kind):
    return [value for value in kind.activations if value.role == "mask"]


def test_every_mask_may_be_drawn_again(plain_training):
    _, _, profile, _ = plain_training
    assert all(masks_of(kind) for kind in profile.kinds)
    assert all(mask.recomputable for kind in profile.kinds for mask in masks_of(kind))


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_some_masks_drawn_again_beside_others_that_are_kept(plain_training, run_steps, assert_same_steps, data):
    """Some masks are redrawn next to retained ones, with any plan for other activations."""
    model, batch, profile, plain = plain_training
    seed = data.draw(st.integers(0, 2**32 - 1))
    others = random_policy(profile, seed, ("retain", "recompute", "compress"), lossless=True)
    plans = []
    for block in profile.blocks:
        masks = masks_of(profile.kind_of(block))
        mask_choices = {mask.index: data.draw(st.sampled_from([RECOMPUTE, RETAIN])) for mask in masks}
        plan = others.plan_of(block.name)
        plans.append(Plan(kind=plan.kind, choices=tuple((dict(plan.choices) | mask_choices).items())))
    policy = policy_of_plans(profile, plans)
    with apply_policy(model, policy, CONFIG):
        assert_same_steps(run_steps(model, batch), plain)
        assert measure_step(model, batch).stored_bytes == policy.predicted_stored_bytes
