"""The profile of a whole model from a trace of a few of its blocks, against a trace of all."""

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, T5Config

from adacc_hf.estimate.adapters import Adapters
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload, fake_model
from adacc_hf.estimate.quantized_weights import Quantization
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
        full_profile = model.profile(2, 32)
        estimate = model.estimate(2, 32)
        again = model.profile(2, 32)
    assert estimate.blocks == full_profile.blocks
    assert estimate.kinds == full_profile.kinds
    for name in ("static_bytes", "outside_stored_bytes", "tail_peak_bytes"):
        assert getattr(estimate, name) == getattr(full_profile, name), name
    assert estimate.outside_peak_bytes >= full_profile.outside_peak_bytes
    if precision == "fp32":
        assert estimate.outside_peak_bytes == full_profile.outside_peak_bytes
        for action in ("retain", "recompute"):
            plans = [uniform_policy(profile, action).predicted_peak_bytes for profile in (estimate, full_profile)]
            assert plans[0] == plans[1]
    assert again == full_profile, "the model is whole again"


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
        full_profile, estimate = model.profile(2, 32), model.estimate(2, 32)
    assert estimate.blocks == full_profile.blocks
    assert estimate.outside_peak_bytes == full_profile.outside_peak_bytes
    for action in ("retain", "recompute"):
        peaks = [uniform_policy(profile, action).predicted_peak_bytes for profile in (estimate, full_profile)]
        assert peaks[0] == peaks[1]
