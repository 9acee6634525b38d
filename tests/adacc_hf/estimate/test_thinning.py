"""The profile of a whole model from a trace of a few of its blocks, against a trace of all."""

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PretrainedConfig, T5Config

from adacc_hf.artifacts.profile import Profile
from adacc_hf.estimate.adapters import Adapters, Quantization
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import FakeModel, Workload, fake_model
from adacc_hf.estimate.static_memory import PRECISIONS
from adacc_hf.estimate.thinning import Thinning
from adacc_hf.solve.simple_policies import uniform_policy

GPT2 = GPT2Config(n_layer=6, n_embd=64, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)
T5 = T5Config(d_model=64, d_ff=128, num_layers=6, num_heads=4, d_kv=16, vocab_size=500, decoder_start_token_id=0)
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4, vocab_size=500, bos_token_id=0
)


@pytest.mark.parametrize(
    ("config", "precision"),
    [(GPT2, "fp32"), (T5, "fp32"), (T5, "bf16-amp"), (LLAMA, "bf16-amp")],
    ids=["gpt2-fp32", "t5-fp32", "t5-bf16-amp", "llama-bf16-amp"],
)
def test_a_few_blocks_tell_the_whole(config: PretrainedConfig, precision: str) -> None:
    workload = Workload(config=config, device=find_device("h100"), precision=PRECISIONS[precision])
    with fake_model(workload) as model:
        assert model.thinning.gaps
        of_a_few, of_all = model.profile(2, 32), profile_of_all(model)
    for name in ("blocks", "kinds", "shared", "static_bytes", "outside_stored_bytes", "loss_peak_bytes"):
        assert getattr(of_a_few, name) == getattr(of_all, name), name
    assert of_a_few.step_ms == pytest.approx(of_all.step_ms)
    assert of_a_few.outside_peak_bytes >= of_all.outside_peak_bytes
    assert of_a_few.tail_peak_bytes >= of_all.tail_peak_bytes
    if precision == "fp32":
        assert of_a_few.outside_peak_bytes == of_all.outside_peak_bytes
        for action in ("retain", "recompute"):
            plans = [uniform_policy(profile, action).predicted_peak_bytes for profile in (of_a_few, of_all)]
            assert plans[0] == plans[1]


def profile_of_all(model: FakeModel) -> Profile:
    """Return the profile of a step in which every block is traced."""
    model.thinning = Thinning(model.model, {})
    return model.profile(2, 32)


def test_layers_of_several_types_are_all_traced() -> None:
    """The types are chosen by a layer's place, so that a layer whose predecessor is left out has another's type."""
    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, head_dim=16, vocab_size=500
    )
    workload = Workload(config=config, device=find_device("h100"), precision=PRECISIONS["bf16"])
    with fake_model(workload) as model:
        assert not model.thinning.gaps


def test_blocks_that_differ_in_a_setting_are_traced() -> None:
    workload = Workload(config=GPT2, device=find_device("h100"), precision=PRECISIONS["fp32"])
    with fake_model(workload) as model:
        model.blocks[2].attn.attn_dropout.p = 0.0
        assert not Thinning(model.model, dict(zip(model.block_names, model.blocks, strict=True))).gaps


def test_dequantized_weights_of_blocks_left_out_are_not_counted() -> None:
    """They are freed after each product, unlike casts in autocast's cache."""
    workload = Workload(
        config=LLAMA,
        device=find_device("h100"),
        precision=PRECISIONS["bf16"],
        adapters=Adapters(),
        quantization=Quantization(),
    )
    with fake_model(workload) as model:
        of_a_few, of_all = model.profile(2, 32), profile_of_all(model)
    assert of_a_few.blocks == of_all.blocks
    assert of_a_few.outside_peak_bytes == of_all.outside_peak_bytes
