"""Effects of codecs and replay on the gradients of single operators, and the use that profiling makes of them."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import adacc_hf.price.measurement as measurement_module
from adacc_hf import Action, AdaccConfig, Profile, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.policy import RECOMPUTE
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.price.measurement import Measurement
from adacc_hf.solve.simple_policies import random_policy, uniform_policy

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = AdaccConfig(min_compress_bytes=0)


class RecordingMeasurement(Measurement):
    """A measurement that records the errors of each block."""

    def __init__(self):
        self.records = []

    def gradient_errors(self, tape, bases, prices, config):
        self.records.append(
            (tape, [base.clone() for base in bases], super().gradient_errors(tape, bases, prices, config))
        )
        return self.records[-1][2]


def sharpen(model, block, factor):
    """Scale the queries and keys of one block of a GPT-2. Scores grow with the square."""
    weight = model.transformer.h[block].attn.c_attn.weight
    with torch.no_grad():
        weight[:, : 2 * weight.shape[0]] *= factor


@pytest.fixture
def sharp_gpt2():
    """A GPT-2 without dropout, so that its attention is fused. Attention is sharp in the last block."""

    def build(attention="sdpa", factor=14):
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=96, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention, use_cache=False,
            loss_type="ForCausalLM",
        )  # fmt: skip
        model = GPT2LMHeadModel(config).train()
        sharpen(model, -1, factor)
        return model

    return build


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def error_under(model, batch, policy):
    plain = gradients(model, batch)
    with apply_policy(model, policy, CONFIG):
        gradients(model, batch)
        return float((gradients(model, batch) - plain).norm() / plain.norm())


def codecs_of(profile, name):
    (kind,) = profile.kinds
    return [option.codec for value in kind.activations if value.name == name for option in value.codecs]


def test_the_error_is_that_of_the_operators_backward(toy_model, toy_batch):
    model, batch = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()), 1), toy_batch(64)
    measurement = RecordingMeasurement()
    profile_model(model, batch, CONFIG.with_overrides(codecs=("token_int4",)), measurement=measurement)
    ((tape, bases, errors),) = measurement.records
    (value,) = [v.index for v in tape.values if v.name.endswith("tanh")]
    exact, coded = bases[value], get_codec("token_int4").decode(get_codec("token_int4").encode(bases[value]))
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    slopes = [weights * (1 - tanh.square()) for tanh in (exact, coded)]
    of_tanh = (slopes[1] - slopes[0]).norm() / slopes[0].norm()
    of_product = (coded - exact).norm() / exact.norm()
    # Sums of as many elements in float32, added in another order.
    assert errors.codecs[value, "token_int4"] == pytest.approx(float(max(of_tanh, of_product)), rel=1e-4)


def test_sharp_fused_attention_takes_its_queries_and_keys_in_int8(
    sharp_gpt2, token_batch, measurement_without_errors, tmp_path
):
    """Sharp fused attention gets INT8 for queries and keys, although it is sharp in a block that was not priced."""
    model, batch = sharp_gpt2(), token_batch(4, 32)
    before = error_under(
        model,
        batch,
        uniform_policy(profile_model(model, batch, CONFIG, measurement=measurement_without_errors), Action.COMPRESS),
    )
    profile = profile_model(model, batch, CONFIG)
    assert codecs_of(profile, "attn.c_attn:addmm") == ["int8"]
    ((codec, error),) = next(v for v in profile.kinds[0].values if v.name == "attn.c_attn:addmm").too_coarse
    assert codec == "channel_int4"
    assert error > DEGRADED_ERROR
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    # INT4 has an error of about 0.1 in the others.
    assert error_under(model, batch, uniform_policy(profile, Action.COMPRESS)) < 0.2 < 0.4 < before


@pytest.mark.parametrize("seed", range(4))
def test_a_sharp_softmax_is_not_recomputed_from_what_codecs_left(sharp_gpt2, token_batch, seed):
    model, batch = sharp_gpt2("eager", 22), token_batch(4, 32)
    profile = profile_model(model, batch, CONFIG)
    (kind,) = profile.kinds
    (softmax,) = [value for value in kind.activations if value.role == "softmax"]
    assert softmax.is_far_recomputed
    queries_and_keys = {value.index for value in kind.activations[: softmax.index] if value.role == "qkv"}
    assert (
        kind.exactness_dependents[softmax.index]
        >= {index for index in queries_and_keys if index < softmax.index}
        != set()
    )
    both = random_policy(profile, seed, (Action.COMPRESS, Action.RECOMPUTE))
    assert all(dict(plan.choices)[softmax.index] != RECOMPUTE for plan in both.plans)
    assert error_under(model, batch, both) < 0.25
    exact = uniform_policy(profile, Action.RECOMPUTE)
    assert dict(exact.plans[0].choices)[softmax.index] == RECOMPUTE
    assert error_under(model, batch, exact) == 0


@pytest.mark.parametrize("budget", [0.2, 0.3, 0.4, 0.5])
def test_the_solver_stores_what_would_be_recomputed_far_off(sharp_gpt2, token_batch, budget):
    model, batch = sharp_gpt2("eager", 22), token_batch(4, 32)
    profile = profile_model(model, batch, CONFIG)
    policy = solve_policy(profile, budget, CONFIG)
    for plan in policy.plans:
        choices = dict(plan.choices)
        coded = {value for value, choice in choices.items() if choice.codec not in (None, "bitmask")}
        assert not any(choices[value] == RECOMPUTE for value in profile.kinds[0].exactness_dependents_of(coded))
    assert error_under(model, batch, policy) < 0.25


@pytest.mark.parametrize("codecs", [None, ("channel_int4",)])
def test_other_attention_is_left_as_it_is(tiny_gpt2, token_batch, codecs):
    profile = profile_model(tiny_gpt2("sdpa"), token_batch(4, 32), CONFIG.with_overrides(codecs=codecs))
    assert "channel_int4" in {option.codec for value in profile.kinds[0].activations for option in value.codecs}
    assert not any(value.replay_error > 0.25 for value in profile.kinds[0].activations if not value.is_statistic)


def test_where_memory_runs_out_nothing_is_tried(sharp_gpt2, token_batch, caplog, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(measurement_module, "gradient_errors", fail)
    profile = profile_model(sharp_gpt2(), token_batch(4, 32), CONFIG)
    assert codecs_of(profile, "attn.c_attn:addmm") == ["channel_int4"]
    assert "not enough memory to measure how codecs change the gradients of GPT2Block" in caplog.text


def test_a_codec_of_the_settings_that_is_too_coarse_has_no_other_in_its_place(sharp_gpt2, token_batch):
    profile = profile_model(sharp_gpt2(), token_batch(4, 32), CONFIG.with_overrides(codecs=("channel_int4",)))
    assert codecs_of(profile, "attn.c_attn:addmm") == []
