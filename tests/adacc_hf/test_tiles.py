"""Training with row-wise modules in tiles: gradients, peaks, dropout, hooks, changed state, and no trace afterwards."""

import gc
import random
import weakref
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, AdaccSession, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts import tiles
from adacc_hf.artifacts.errors import PolicyMismatchError, TilesError
from adacc_hf.artifacts.plans import random_plan, recompute_plan
from adacc_hf.artifacts.policy import Action, Policy
from adacc_hf.reports.explain import explain_policy
from adacc_hf.solve.simple_policies import policy_of_plans
from adacc_hf.torch_glue.memory import measure_step

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21

LOSSLESS = AdaccConfig(actions=("retain", "recompute", "tile"), head="plain")
EXACT = AdaccConfig(actions=("retain", "recompute"), head="plain")

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest relative difference of a gradient from plain training's, by the dtype of the products: the tolerance of the
chunked head. Only the order of sums differs. Sums of float32 have errors near 1e-7. A product in bfloat16 is rounded to
8 bits, a relative error of up to 4e-3, in plain training and in each tile."""


class QuantizedLinear(torch.nn.Module):
    """Linear layer with 8-bit weights, whose scales are attached to the weight, as in bitsandbytes."""

    def __init__(self, layer):
        super().__init__()
        scales = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        integers = (layer.weight.detach() / scales).round().to(torch.int8)
        self.weight = torch.nn.Parameter(integers, requires_grad=False)
        self.weight.scales = scales

    def forward(self, rows):
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype) * self.weight.scales)


def build(name, tiny_gpt2, tiny_llama):
    """Return a model in train mode, which draws no random numbers unless its name says so."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "decoder_start_token_id": 0, "pad_token_id": 0}
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(d_model=32, d_ff=128, num_layers=2, num_heads=2, d_kv=16, dropout_rate=0.0, **sizes)
        ).train()
    if name == "qwen3":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        return Qwen3ForCausalLM(
            Qwen3Config(hidden_size=32, intermediate_size=128, num_hidden_layers=2, vocab_size=61, **heads)
        ).train()
    if name == "gpt2":
        return tiny_gpt2()
    llama = tiny_llama(intermediate_size=128)
    if name == "quantized":
        for block in llama.model.layers:
            block.mlp.up_proj = QuantizedLinear(block.mlp.up_proj)
    if name in ("lora", "quantized"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(llama, LoraConfig(r=4, target_modules=["gate_proj", "down_proj", "q_proj"])).train()
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:  # PEFT's zeros would hide the gradients of lora_A
                torch.nn.init.normal_(parameter, std=0.02)
        return model
    return llama.bfloat16() if name == "llama-bf16" else llama


def batch_of(num_samples, length, seed=0):
    ids = torch.randint(3, 60, (num_samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients_of(model, batch, autocast=False, steps=1):
    """Return the gradients of some micro-batches, with equal random numbers each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            loss = model(**batch).loss
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def differences(gradients, expected):
    """Return the largest relative difference of a gradient."""
    assert gradients.keys() == expected.keys()
    return max(
        float((gradients[name].float() - other.float()).norm() / other.float().norm().clamp(min=1e-6))
        for name, other in expected.items()
    )


def tiled_policy(profile, num_tiles, plan_of=recompute_plan):
    """Return the policy in which every block runs its row-wise module in `num_tiles` tiles."""
    numbers = [0 if profile.kind_of(block).tiled is None else num_tiles for block in profile.blocks]
    assert any(numbers), "no block has a row-wise module"
    tiled = profile.with_tiles(numbers)
    return policy_of_plans(tiled, [plan_of(tiled.kind_of(block)) for block in tiled.blocks])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5", "lora", "quantized", "llama-bf16", "llama-autocast"])
@settings(
    max_examples=2,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # a search for a smaller example would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    num_tiles=st.integers(2, 40),
    num_samples=st.integers(1, 3),
    length=st.integers(9, 40),
    steps=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_gradients_and_peaks_are_those_of_plain_training(
    without_onednn, one_thread, few_rows, tiny_gpt2, tiny_llama, name, num_tiles, num_samples, length, steps, seed
):
    model, batch = build(name, tiny_gpt2, tiny_llama), batch_of(num_samples, length, seed)
    autocast = name == "llama-autocast"
    is_half = autocast or name == "llama-bf16"
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        profile = profile_model(model, batch, LOSSLESS)
    expected = gradients_of(model, batch, autocast, steps)
    generator = random.Random(seed)
    plan_of = partial(random_plan, generator=generator, allowed=list(Action), lossless=True, checkpoint_share=0.0)
    policy = tiled_policy(profile, num_tiles, plan_of)
    with apply_policy(model, policy):
        for _ in range(3):  # recorded, validated, and neither
            gradients = gradients_of(model, batch, autocast, steps)
            assert differences(gradients, expected) <= TOLERANCES[torch.bfloat16 if is_half else torch.float32]
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            peak = measure_step(model, batch).peak_bytes
    assert peak == pytest.approx(policy.predicted_peak_bytes, rel=0, abs=512)
    assert differences(gradients_of(model, batch, autocast, steps), expected) == 0, "the policy left a trace"


def test_dropout_masks_in_backward_are_those_of_forward(one_thread, few_rows):
    """Compare with a model whose module runs in the same tiles with a graph, and so draws the same masks."""
    from transformers import T5Config, T5ForConditionalGeneration

    def model():
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 61}
        return T5ForConditionalGeneration(
            T5Config(dropout_rate=0.3, decoder_start_token_id=0, pad_token_id=0, **sizes)
        ).train()

    tiled, reference, batch = model(), model(), batch_of(2, 21)
    policy = tiled_policy(profile_model(tiled, batch, LOSSLESS), 3)
    for module in (reference.encoder.block[0].layer[1], reference.decoder.block[0].layer[2]):
        forward = module.forward

        def in_tiles(rows, forward=forward):
            parts = rows.reshape(1, -1, rows.shape[-1]).split(tiles.tile_rows(42, 3), 1)
            return torch.cat([forward(part) for part in parts], 1).reshape(rows.shape)

        module.forward = in_tiles
    expected = gradients_of(reference, batch)
    with apply_policy(tiled, policy):
        for _ in range(3):
            assert differences(gradients_of(tiled, batch), expected) <= TOLERANCES[torch.float32]


def test_state_that_changes_before_backward_ends_the_step_with_an_error(one_thread, few_rows, tiny_llama):
    model, batch = tiny_llama(intermediate_size=128), batch_of(2, 16)
    policy = tiled_policy(profile_model(model, batch, LOSSLESS), 4)
    with apply_policy(model, policy):
        gradients_of(model, batch)
        loss = model(**batch).loss
        mlp = model.model.layers[1].mlp
        mlp.act_fn = torch.nn.ReLU()
        with pytest.raises(TilesError, match="other Python code in backward"):
            loss.backward()


def test_hooks_on_parameters_run_once_for_the_whole_gradient(one_thread, few_rows, tiny_llama):
    model, batch = tiny_llama(intermediate_size=128), batch_of(2, 16)
    weight = model.model.layers[0].mlp.up_proj.weight
    expected = gradients_of(model, batch)["model.layers.0.mlp.up_proj.weight"].clone()
    calls = []
    weight.register_hook(lambda gradient: calls.append(gradient.shape) or 2 * gradient)
    with apply_policy(model, tiled_policy(profile_model(model, batch, LOSSLESS), 4)):
        calls.clear()
        doubled = gradients_of(model, batch)["model.layers.0.mlp.up_proj.weight"]
    assert calls == [weight.shape]
    assert torch.allclose(doubled, 2 * expected, rtol=1e-4, atol=1e-6)


def test_a_module_with_hooks_inside_runs_whole(few_rows, tiny_llama):
    model, batch = tiny_llama(intermediate_size=128), batch_of(2, 16)
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *call: None)
    profile = profile_model(model, batch, LOSSLESS)
    assert all(kind.tiled is None for kind in profile.kinds), "both blocks are of one kind"


def test_a_policy_for_a_module_that_the_block_lacks_is_refused(few_rows, tiny_llama):
    model, batch = tiny_llama(intermediate_size=128), batch_of(2, 16)
    policy = tiled_policy(profile_model(model, batch, LOSSLESS), 4)
    record = policy.to_json()
    record["plans"][0]["tiling"]["modules"] = ["feed_forward"]
    with pytest.raises(PolicyMismatchError, match=r"runs module feed_forward of block model\.layers\.0 in tiles"):
        apply_policy(model, Policy.from_json(record, "test"))


def test_a_model_that_trained_in_tiles_is_freed(few_rows, tiny_llama):
    model, batch = tiny_llama(intermediate_size=128), batch_of(2, 16)
    with apply_policy(model, tiled_policy(profile_model(model, batch, LOSSLESS), 4)):
        gradients_of(model, batch)
    reference = weakref.ref(model.model.layers[0].mlp)
    del model
    gc.collect()
    assert reference() is None


def test_the_solver_uses_tiles_only_where_they_are_allowed_and_needed(few_rows, tiny_budgets, tiny_llama, tmp_path):
    model, batch = tiny_llama(intermediate_size=512, layers=4), batch_of(1, 64)
    profile = profile_model(model, batch, AdaccConfig())
    least = {}
    for config in (EXACT, LOSSLESS):
        for factor in (1.3, 1.1, 1.0):
            budget = int(factor * _least(profile, config))
            least[config] = solve_policy(profile, budget, config)
            assert config is LOSSLESS or not any(least[config].tilings)
            assert least[config].predicted_peak_bytes <= budget
    with_tiles, without = least[LOSSLESS], least[EXACT]
    assert any(with_tiles.tilings)
    assert with_tiles.predicted_peak_bytes < without.predicted_peak_bytes
    assert not any(solve_policy(profile, 2**40, LOSSLESS).tilings), "plain training fits"
    policy = Policy.from_json(with_tiles.to_json(), "test")
    assert policy == with_tiles
    text = explain_policy(policy, profile)
    assert "mlp runs in" in text
    profile.save(tmp_path / "profile.json")
    assert type(profile).load(tmp_path / "profile.json") == profile
    with apply_policy(model, policy):
        gradients_of(model, batch)
        model.zero_grad(set_to_none=True)
        assert measure_step(model, batch).peak_bytes == pytest.approx(policy.predicted_peak_bytes, abs=512)


def test_a_session_trains_within_a_budget_that_needs_tiles(one_thread, few_rows, tiny_budgets, tiny_llama, monkeypatch):
    model, batches = tiny_llama(intermediate_size=512, layers=4), [batch_of(1, 64, seed) for seed in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    profile = profile_model(deepcopy(model), batches[0], AdaccConfig(), optimizer)
    least = [_least(profile, config) for config in (EXACT, LOSSLESS)]
    budget = int(0.5 * sum(least))
    assert least[1] < 0.95 * least[0]
    session = AdaccSession(model, optimizer, LOSSLESS, memory_budget=budget)
    monkeypatch.setattr("adacc_hf.run.block_executor.Recording", None)  # the profile has recorded all calls
    for batch in batches:
        with session.step(batch):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(session.policy.tilings)
    session.close()
    assert all("forward" not in module.__dict__ for module in model.modules())


def _least(profile, config):
    from adacc_hf.solve.solver import quick_least_policy

    return quick_least_policy(profile, config).predicted_peak_bytes
