"""Profiles from fake tensors against profiles from real runs, for the same model on the same device."""

from collections import Counter
from typing import Any

import pytest
import torch
from fake_profiles import gpt2
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    T5Config,
)

from adacc_hf import AdaccConfig, Profile, profile_model
from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_backward import FakeBackward
from adacc_hf.estimate.fake_device import fake_autocast, fake_tensors
from adacc_hf.estimate.fake_measurement import FakeMeasurement, SumOfTimes, operator_ms
from adacc_hf.estimate.planning import plain_ms
from adacc_hf.solve.simple_policies import uniform_policy

pytestmark = pytest.mark.usefixtures("one_thread", "without_onednn")  # each thread converts in a buffer of its own

SCALAR_BYTES = 512
"""Bytes per block of 8-byte scalars in real runs (a scale, a token count), which are Python numbers on fake tensors."""

LOSSLESS = AdaccConfig(actions=("retain", "recompute"))
"""Settings without codecs, which are timed on real tensors only."""


def llama(width: int, layers: int) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
        bos_token_id=0,
        eos_token_id=0,
    )


def t5(width: int, layers: int) -> PretrainedConfig:
    return T5Config(
        d_model=width,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=4,
        d_kv=width // 4,
        vocab_size=500,
        decoder_start_token_id=0,
    )


EXPERTS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 500,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def profile(config: PretrainedConfig, attention: str, dtype: torch.dtype | None, fake: bool) -> Profile:
    """Return the profile of a model on the CPU, with real or fake tensors."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention).train()
    model.config.use_cache = False
    ids = torch.zeros((2, 48), dtype=torch.long)
    with fake_autocast("cpu", dtype):
        measurement = FakeMeasurement(find_device("cpu")) if fake else None
        batch = {"input_ids": ids, "labels": ids.clone()}
        return profile_model(model, batch, LOSSLESS, measurement=measurement)


def activations(kind: KindProfile) -> Counter[tuple[Any, ...]]:
    """Return the number of activations of each shape, dtype, size and treatment in a kind, in no order."""
    records = [(v.shape, v.dtype, v.nbytes, v.saved, v.recomputable, v.role) for v in kind.activations]
    return Counter(records)


CASES = {
    "gpt2-sdpa-fp32": (gpt2(32, 2), "sdpa", None),
    "gpt2-eager-bf16-amp": (gpt2(96, 2), "eager", torch.bfloat16),
    "llama-sdpa-bf16-amp": (llama(96, 2), "sdpa", torch.bfloat16),
    "llama-eager-fp32": (llama(32, 2), "eager", None),
    "t5-sdpa-fp32": (t5(32, 2), "sdpa", None),
    "t5-eager-bf16-amp": (t5(64, 1), "eager", torch.bfloat16),
    "mixtral-sdpa-fp32": (MixtralConfig(intermediate_size=48, num_local_experts=4, **EXPERTS), "sdpa", None),
    "qwen3-moe-sdpa-bf16-amp": (
        Qwen3MoeConfig(moe_intermediate_size=24, num_experts=8, head_dim=8, **EXPERTS),
        "sdpa",
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_activations_and_peaks_equal_those_of_a_real_run(case: str) -> None:
    config, attention, dtype = CASES[case]
    real = profile(config, attention, dtype, fake=False)
    with fake_tensors("cpu"):
        fake = profile(config, attention, dtype, fake=True)
    assert [block.name for block in fake.blocks] == [block.name for block in real.blocks]
    for mine, theirs in zip(fake.kinds, real.kinds, strict=True):
        assert activations(mine) == activations(theirs)
    assert fake.static_bytes == real.static_bytes
    assert abs(fake.plain_stored_bytes - real.plain_stored_bytes) <= SCALAR_BYTES
    plain = [uniform_policy(p, "retain").predicted_peak_bytes for p in (fake, real)]
    assert abs(plain[0] - plain[1]) <= SCALAR_BYTES
    full = [uniform_policy(p, "recompute").predicted_peak_bytes for p in (fake, real)]
    assert abs(full[0] - full[1]) <= SCALAR_BYTES


@pytest.mark.parametrize("config", [gpt2(64, 3), t5(64, 3)], ids=["gpt2", "t5"])
def test_a_plain_step_takes_what_is_left_of_the_profiled_one_without_replay(config: PretrainedConfig) -> None:
    """The predicted time of a plain step is the profiled step's without replay, which redraws dropout."""
    device = find_device("h100")
    with fake_tensors("cuda"), fake_autocast("cuda", torch.bfloat16):
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="sdpa").train()
        ids = torch.zeros((2, 32), dtype=torch.long)
        with SumOfTimes(device) as times:
            FakeMeasurement(device).backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        model.zero_grad(set_to_none=True)
        profile = profile_model(model, {"input_ids": ids, "labels": ids}, measurement=FakeMeasurement(device))
    assert plain_ms(profile) == pytest.approx(times.total_ms, rel=1e-9)  # sums of the same numbers in other orders


def test_a_question_to_a_tensor_takes_no_time() -> None:
    """Reading a fake tensor's device takes no time. Torch dispatches it as an operator, without a kernel."""
    device = find_device("h100")
    with fake_tensors("cuda"):
        hidden = torch.empty(1024, 1024)
        assert operator_ms(device, torch.ops.prim.device.default, (hidden,), {}, hidden.device) == 0
        assert operator_ms(device, torch.ops.aten.exp.default, (hidden,), {}, hidden.exp()) > 0
        out = torch.empty_like(hidden)
        as_result = operator_ms(device, torch.ops.aten.exp.out, (hidden,), {"out": out}, out)
        assert as_result == operator_ms(device, torch.ops.aten.exp.default, (hidden,), {}, out)  # written, not read


def test_new_memory_takes_no_time() -> None:
    """Allocation takes no time. No kernel writes the result of `empty`, which replaces dropout's input in replay."""
    device = find_device("h100")
    with fake_tensors("cuda"), SumOfTimes(device) as times:
        hidden = torch.empty(1024, 1024)
        torch.empty_like(hidden), hidden.new_empty(8), torch.empty_strided((8, 8), (8, 1))
        assert times.total_ms == 0
        hidden.exp()
        assert times.total_ms > 0


def test_causal_attention_takes_half_the_operations() -> None:
    """Causal attention takes half the operations: kernels skip blocks above the diagonal, in forward and backward."""
    device = find_device("a100")
    times: list[list[float]] = []
    with fake_tensors("cuda"):
        for is_causal in (True, False):
            query, key, value = (
                torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
            )
            with SumOfTimes(device) as forward:
                attention_sum = scaled_dot_product_attention(query, key, value, is_causal=is_causal).sum()
            with SumOfTimes(device) as backward:
                FakeBackward().run(attention_sum)
            times.append([forward.total_ms, backward.total_ms])
    for causal_ms, full_ms in zip(*times, strict=True):
        assert causal_ms / full_ms == pytest.approx(0.5, abs=0.05)  # launches and the sum come on top


@pytest.mark.parametrize(
    ("dtype", "columns", "is_slower"),
    [
        (torch.bfloat16, 4096, False),
        (torch.bfloat16, 4104, False),
        (torch.bfloat16, 4097, True),
        (torch.float32, 4097, False),
    ],
)
def test_products_of_halves_take_longer_where_rows_start_anywhere(
    dtype: torch.dtype, columns: int, is_slower: bool
) -> None:
    """Products of 16-bit floats take longer with unaligned rows, in inputs and outputs, transposed or not."""
    device = find_device("h100")
    with fake_tensors("cuda"):
        rows, weight = torch.empty(8192, 8192, dtype=dtype), torch.empty(columns, 8192, dtype=dtype)
        logits = torch.empty(8192, columns, dtype=dtype)
        buffer = torch.empty(8192, 4160, dtype=dtype)[:, :columns]  # row strides are a multiple of 16 bytes

        def tera_flops(*factors: torch.Tensor, out: torch.Tensor | None = None) -> float:
            with SumOfTimes(device) as times:
                torch.mm(*factors, out=out)
            return 2 * 8192 * 8192 * columns / times.total_ms / 1e9

        peak = device.flops[str(dtype).removeprefix("torch.")] / 1e12
        expected = pytest.approx(peak * (device.unaligned_share if is_slower else 1.0), rel=0.02)  # plus the launch
        assert tera_flops(rows, weight.T) == expected
        assert tera_flops(logits, weight) == expected
        assert tera_flops(logits.T, rows) == expected
        aligned = pytest.approx(peak, rel=0.02)
        assert tera_flops(rows, weight.T, out=buffer) == aligned
        assert tera_flops(buffer, weight) == aligned
        assert tera_flops(buffer.T, rows) == aligned


def test_a_grouped_product_takes_the_operations_of_its_rows() -> None:
    """Each row meets the weight of one group, in the product and in both of its gradients."""
    device = find_device("h100")
    expected = pytest.approx(2 * 8192 * 4096 * 2048 / device.flops["bfloat16"] * 1e3 + device.launch_ms)
    with fake_tensors("cuda"):
        rows, outputs = (torch.empty(8192, width, dtype=torch.bfloat16) for width in (4096, 2048))
        weights, ends = torch.empty(8, 4096, 2048, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int32)
        for first, second in ((rows, weights), (outputs, weights.mT), (rows.T, outputs), (weights.mT, rows.T)):
            with SumOfTimes(device) as times:
                torch.nn.functional.grouped_mm(first, second, offs=ends)
            assert times.total_ms == expected


def test_a_product_added_to_a_wider_sum_has_the_rate_of_its_factors() -> None:
    """A product added to a wider sum runs at the rate of its factors' dtype, as the chunked head's gradient does."""
    device = find_device("h100")
    with fake_tensors("cuda"), SumOfTimes(device) as times:
        factor, total = torch.empty(8192, 8192, dtype=torch.bfloat16), torch.empty(8192, 8192)
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    assert times.total_ms == pytest.approx(2 * 8192**3 / device.flops["bfloat16"] * 1e3, rel=0.02)  # plus the launch
