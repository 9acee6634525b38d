"""Plans with LoRA adapters, 4-bit weights and bfloat16 weights, against real runs of the same models."""

from collections import Counter

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from adacc_hf import AdaccConfig, Profile, profile_model
from adacc_hf.estimate import fake_model as fake
from adacc_hf.estimate.adapters import Adapters, Quantization, QuantizedLinear, quantization_of
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_device import fake_autocast
from adacc_hf.estimate.fake_model import Workload
from adacc_hf.estimate.static_memory import PRECISIONS
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import measure_step

pytestmark = pytest.mark.usefixtures("one_thread", "without_onednn")  # each thread converts in a buffer of its own

LOSSLESS = AdaccConfig(actions=("retain", "recompute"))
SCALAR_BYTES = 512
"""Bytes per block of 8-byte scalars in real runs, which are Python numbers on fake tensors."""
LLAMA = LlamaConfig(
    num_hidden_layers=2, hidden_size=96, intermediate_size=256, num_attention_heads=4, vocab_size=500, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip
GPT2 = GPT2Config(n_layer=2, n_embd=96, n_head=4, n_positions=64, vocab_size=500, bos_token_id=0, eos_token_id=0)
CASES = {
    "bf16 weights": (LLAMA, "bf16-weights-amp", None, None),
    "dropout": (LLAMA, "fp32", Adapters(dropout=0.1), None),
    "modules to save": (LLAMA, "fp32", Adapters(modules_to_save=("lm_head",)), None),
    "4 bits": (LLAMA, "fp32", Adapters(), Quantization()),
    "4 bits, bf16 weights": (LLAMA, "bf16-weights-amp", Adapters(), Quantization()),
    "4 bits, nested scales": (GPT2, "fp32", Adapters(rank=4), Quantization(has_nested_scales=True)),
}


def workload(config: PretrainedConfig, precision: str, adapters: Adapters | None, quantization: Quantization | None):
    return Workload(
        config=config, device=find_device("cpu"), precision=PRECISIONS[precision], adapters=adapters,
        quantization=quantization, trace="cpu", adacc=LOSSLESS,
    )  # fmt: skip


def real_model(workload: Workload) -> torch.nn.Module:
    """Return the model of `workload` with memory. Its weights are 0 or small random numbers."""
    model = fake.empty_model(workload, workload.precision.weights).train()
    model.config.use_cache = False
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype.is_floating_point:
            tensor.data.normal_(std=0.02)
        else:
            tensor.data.zero_()
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros((2, 48), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def activations(profile: Profile) -> list[Counter]:
    return [
        Counter((v.shape, v.dtype, v.nbytes, v.saved, v.recomputable) for v in k.activations) for k in profile.kinds
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_plan_has_the_bytes_of_a_real_run(case: str) -> None:
    settings = workload(*CASES[case])
    model = real_model(settings)
    autocast = settings.precision.autocast
    with fake_autocast("cpu", autocast and getattr(torch, autocast)):
        real = profile_model(model, batch(), LOSSLESS)
        step = measure_step(model, batch())
    with fake.fake_model(settings) as fake_model:
        planned = fake_model.profile(2, 48)
    assert activations(planned) == activations(real)
    assert planned.static_bytes == real.static_bytes
    assert abs(planned.plain_stored_bytes - real.plain_stored_bytes) <= SCALAR_BYTES
    peak = uniform_policy(planned, "retain").predicted_peak_bytes
    assert abs(peak - uniform_policy(real, "retain").predicted_peak_bytes) <= SCALAR_BYTES
    assert abs(step.peak_bytes - peak) <= SCALAR_BYTES


def test_four_bits_take_half_a_byte_and_a_scale_for_64_weights() -> None:
    layer = torch.nn.Linear(128, 256, bias=False)
    bytes_of = [
        sum(tensor.nbytes for tensor in (*quantized.parameters(), *quantized.buffers()))
        for quantized in (QuantizedLinear(layer, has_nested_scales=nested) for nested in (False, True))
    ]
    weights, tables = 128 * 256, 16 * 4
    assert bytes_of[0] == weights // 2 + 4 * weights // 64 + tables
    assert bytes_of[1] == weights // 2 + weights // 64 + 4 * weights // 64 // 256 + tables + 256 * 4 + 4


def test_the_head_and_skipped_modules_keep_their_weights() -> None:
    settings = workload(LLAMA, "fp32", Adapters(), Quantization(skipped_modules=("down_proj",)))
    names = [name for name, module in real_model(settings).named_modules() if isinstance(module, QuantizedLinear)]
    assert len(names) == LLAMA.num_hidden_layers * 6
    assert not any("down_proj" in name or "lm_head" in name for name in names)


def test_a_quantization_config_is_planned_or_refused() -> None:
    def settings(**values: object) -> PretrainedConfig:
        return LlamaConfig(quantization_config=values)

    assert quantization_of(LLAMA, "m") is None
    nested = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"]}
    expected = Quantization(has_nested_scales=True, skipped_modules=("lm_head",))
    assert quantization_of(settings(quant_method="bitsandbytes", **nested), "m") == expected
    for values, method in (
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit weights of bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ):
        with pytest.raises(
            ValueError, match=rf"--model=m has a quantization_config \({method}\) that cannot be planned"
        ):
            quantization_of(settings(**values), "m")


def test_quantized_weights_need_adapters_on_one_device() -> None:
    with pytest.raises(ValueError, match="weights of 4 bits cannot be trained: add --peft lora"):
        workload(LLAMA, "fp32", None, Quantization())


def test_adapters_have_the_rank_and_the_layers_asked_for(plan):
    options = ["--peft", "lora"]
    one = plan(*options, "--lora-rank", "4", "--lora-targets", "c_attn")["static"]["gradients_bytes"]
    # A rank of 4 from 64 inputs to 192 outputs, in float32, in each of three blocks.
    assert one == 3 * 4 * (64 + 192) * 4
    assert plan(*options, "--lora-rank", "8", "--lora-targets", "c_attn")["static"]["gradients_bytes"] == 2 * one
