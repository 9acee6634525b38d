"""Plans with Liger's kernels, against bytes that were counted in steps with liger-kernel 0.8.5.

`tests/adacc_hf/test_liger.py` counts them again where liger-kernel is installed.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama import modeling_llama

from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import PRECISIONS, Workload, fake_model
from adacc_hf.estimate.liger_kernels import check_family, rotary_kernels
from adacc_hf.estimate.plan_report import to_text
from adacc_hf.estimate.planning import Request, TrainingPlanner, plan, training_profile
from adacc_hf.solve.simple_policies import uniform_policy

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
COUNTED = {
    "llama": (LlamaConfig(**SIZES), 3_605_504, 3_774_752),
    "qwen3": (Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True), 4_023_296, 4_192_544),
}
"""(configuration, stored bytes, peak above the model and its batch) of a plain step of 4 x 64 tokens in float32, with
`_apply_liger_kernel_to_instance` and `measure_step`, under Triton's interpreter."""


def request(config: PretrainedConfig, device: str = "cpu", precision: str = "fp32", liger: bool = True) -> Request:
    found = find_device(device)
    workload = Workload(config=config, device=found, precision=PRECISIONS[precision], trace=found.trace, liger=liger)
    return Request(model="m", workload=workload, batch_size=4, seq_len=64, optimizer="sgd", find_largest=False)


@pytest.mark.parametrize("name", COUNTED)
def test_a_plan_predicts_the_bytes_of_a_step(name: str) -> None:
    config, stored_bytes, peak_bytes = COUNTED[name]
    _, profile = training_profile(request(config))
    assert profile.plain_stored_bytes == stored_bytes
    assert uniform_policy(profile, "retain").predicted_peak_bytes - profile.static_bytes == peak_bytes


@pytest.mark.parametrize("precision", ["bf16", "bf16-amp"])
def test_a_gpu_never_has_all_logits(precision: str) -> None:
    """The peak of the head and the loss is lower by most of the logits, which have 64 times as many elements as the
    hidden states. All activations can be recomputed."""
    config = LlamaConfig(**SIZES | {"vocab_size": 4096, "num_hidden_layers": 1})
    phases = {}
    for liger in (False, True):
        planned = request(config, "h100", precision, liger)
        with fake_model(planned.workload) as model:
            profile = TrainingPlanner(planned, model).profile()
        phases[liger] = profile.loss_peak_bytes - profile.static_bytes
        (kind,) = profile.kinds
        assert all(value.recomputable for value in kind.activations if value.producer is not None)
    logits_bytes = 4 * 64 * config.vocab_size * 4
    weight_bytes = config.vocab_size * config.hidden_size * 4  # the gradient of the weight, and a temporary in float32
    assert phases[True] < phases[False] - logits_bytes + 2 * weight_bytes


def test_the_text_says_that_kernels_are_emulated() -> None:
    text = " ".join(to_text(plan(request(LlamaConfig(**SIZES)))).split())
    assert "sgd, Liger's kernels, on" in text
    assert "Liger's kernels are emulated" in text


def test_rotary_embeddings_are_put_back() -> None:
    before = modeling_llama.apply_rotary_pos_emb
    with rotary_kernels(LlamaConfig()):
        assert modeling_llama.apply_rotary_pos_emb is not before
    assert modeling_llama.apply_rotary_pos_emb is before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--liger is planned for language models of the types llama, mistral, qwen2, qwen3, and not for gpt2"),
        (["--peft", "lora"], "--liger is not planned with --peft: leave out one of the two"),
        (["--tp", "2"], "--liger is not planned with --tp"),
    ],
)
def test_what_is_refused(refusal_of: Any, options: list[str], message: str) -> None:
    assert message in refusal_of("--liger", *options)


def test_classifiers_are_refused() -> None:
    with pytest.raises(ValueError, match="and not for classifiers of llama"):
        check_family(LlamaConfig(architectures=["LlamaForSequenceClassification"]))
