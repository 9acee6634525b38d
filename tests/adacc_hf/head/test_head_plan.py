"""The output head in a plan: profiled both ways, chosen by the solver, checked by the simulator, applied and
removed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf import AdaccConfig, InfeasibleBudgetError, Policy, apply_policy, profile_model, solve_policy
from adacc_hf.artifacts.errors import ChunkedHeadError, PolicyMismatchError
from adacc_hf.artifacts.memory_simulator import simulate, simulate_policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.memory import forward_loss, measure_step

VOCABULARY = 4096
CONFIG = AdaccConfig(min_compress_bytes=0)
CHUNKED = AdaccConfig(min_compress_bytes=0, head="chunked")


@pytest.fixture(scope="module")
def wide(tiny_gpt2, token_batch):
    """A batch and a model whose logits are larger than all blocks, as in GPT-2 with 12 layers."""
    return tiny_gpt2(layers=2, vocab_size=VOCABULARY), token_batch(8, 32, VOCABULARY)


@pytest.fixture(scope="module")
def head_profile(gpt2_like_profile):
    return gpt2_like_profile(num_blocks=3)


@pytest.fixture(scope="module", params=[None, torch.bfloat16], ids=["fp32", "bf16"])
def autocast(request):
    return torch.autocast("cpu", dtype=request.param or torch.bfloat16, enabled=request.param is not None)


@pytest.fixture(scope="module")
def profile(wide, autocast):
    with autocast:
        return profile_model(*wide, CONFIG)


def measure_policy(wide, policy, autocast):
    model, batch = wide
    with autocast, apply_policy(model, policy):
        for _ in range(2):
            forward_loss(model, batch).backward()
        model.zero_grad(set_to_none=True)
        return measure_step(model, batch)


def test_both_heads_are_profiled(profile):
    assert profile.heads == ("plain", "chunked")
    chunked = profile.with_head("chunked")
    assert chunked.heads == ("chunked", "plain")
    assert chunked.with_head("plain") == profile
    assert chunked.outside_peak_bytes < profile.outside_peak_bytes
    assert chunked.head_ms > 0
    assert profile.head_ms > 0
    assert profile.head_overhead_ms == 0
    assert chunked.head_overhead_ms == chunked.head_ms - profile.head_ms


@pytest.mark.parametrize("head", ["plain", "chunked"])
@pytest.mark.parametrize("action", ["retain", "recompute"])
def test_the_prediction_is_what_is_measured_with_either_head(wide, profile, autocast, peak_of, action, head):
    policy = uniform_policy(profile.with_head(head), action)
    assert policy.head == head
    step = measure_policy(wide, policy, autocast)
    assert step.stored_bytes == policy.predicted_stored_bytes
    assert step.peak_bytes == peak_of(policy)


def test_a_budget_that_only_the_chunked_head_meets_is_met(wide, profile, autocast):
    with pytest.raises(InfeasibleBudgetError) as plain:
        solve_policy(profile, 1, replace(CONFIG, head="plain"))
    with pytest.raises(InfeasibleBudgetError) as both:
        solve_policy(profile, 1, CONFIG)
    assert both.value.smallest_budget_bytes < plain.value.smallest_budget_bytes
    budget = (both.value.smallest_budget_bytes + plain.value.smallest_budget_bytes) // 2
    policy = solve_policy(profile, budget, CONFIG)
    assert policy.head == "chunked"
    assert measure_policy(wide, policy, autocast).peak_bytes <= budget


FRACTIONS = (1.0, 0.9, 0.6, 0.3)


@given(ms=st.integers(-30, 30), saved=st.integers(-(2**28), 2**28), limits_peak=st.booleans())
@settings(deadline=None, max_examples=8)
def test_the_fastest_policy_with_any_head_is_found(head_profile, add_chunked_head, ms, saved, limits_peak):
    """The fastest policy of both heads is found: a faster chunked head is chosen although the plain one fits, a slower
    not. The simulator agrees, and more memory never costs time."""
    both = add_chunked_head(head_profile, saved, ms)
    plain = uniform_policy(head_profile, "retain")
    previous_ms = -float("inf")
    for fraction in FRACTIONS:
        budget = int(fraction * plain.predicted_peak_bytes) if limits_peak else fraction
        policies = {}
        for head in ("plain", "chunked", "auto"):
            try:
                policies[head] = solve_policy(both, budget, AdaccConfig(head=head))
            except InfeasibleBudgetError:
                assert head != "auto" or not policies
        if not policies:
            break
        auto = policies.pop("auto")
        best = min(policies.values(), key=lambda policy: policy.predicted_overhead_ms)
        assert auto.predicted_overhead_ms <= best.predicted_overhead_ms + 1e-9  # sums of floats
        assert auto.predicted_overhead_ms >= previous_ms - 1e-9
        previous_ms = auto.predicted_overhead_ms
        outcome = simulate_policy(both, auto)
        blocks_ms = outcome.overhead_ms - (ms if auto.head == "chunked" else 0.0)
        assert outcome.overhead_ms == auto.predicted_overhead_ms
        assert blocks_ms >= -1e-9
        assert outcome.peak_bytes == auto.predicted_peak_bytes
        gap = dict(auto.facts)["gap"]
        assert 0.0 <= gap <= 1.0
        if auto.is_plain:
            assert (dict(auto.facts)["status"], ms >= 0.0) == ("plain", True)


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (AdaccConfig(), ("plain", "chunked")),
        (AdaccConfig(actions=("retain", "recompute")), ("plain",)),
        (AdaccConfig(max_error=0.0), ("plain",)),
        (AdaccConfig(head="plain"), ("plain",)),
        (AdaccConfig(head="chunked", actions=("retain", "recompute")), ("chunked",)),
    ],
    ids=["auto", "lossless", "no error", "plain", "chunked"],
)
def test_which_heads_may_be_chosen(config, heads, gpt2_like_profile, add_chunked_head):
    assert config.heads == heads
    profile = gpt2_like_profile(num_blocks=2)
    policy = solve_policy(add_chunked_head(profile, 0), 1.0, config)
    assert policy.head == heads[0]
    assert policy.is_plain == (policy.head == "plain")


def test_where_only_chunked_is_allowed_whole_logits_never_exist(wide):
    model, batch = wide
    logits = 8 * 32 * VOCABULARY * 4
    profile = profile_model(model, batch, CHUNKED)
    assert profile.heads == ("chunked",)
    assert max(profile.outside_peak_bytes, profile.loss_peak_bytes) - profile.static_bytes < logits
    policy = solve_policy(profile, 0.8, CHUNKED)
    assert policy.head == "chunked"
    with pytest.raises(ValueError, match=r"head='plain' is not in this profile, which has chunked: profile again"):
        solve_policy(profile, 0.8, AdaccConfig(head="plain"))


def test_a_model_without_a_head_keeps_its_plain_one(toy_model, toy_batch, caplog):
    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()))
    with caplog.at_level("INFO"):
        assert profile_model(model, toy_batch(), CONFIG).heads == ("plain",)
    reason = "the head uses full logits (head='plain'): ToyModel has no output layer"
    assert [record.message for record in caplog.records if reason in record.message]
    with pytest.raises(ChunkedHeadError, match="ToyModel has no output layer"):
        profile_model(model, toy_batch(), CHUNKED)
    assert "forward" not in model.head.__dict__


def test_a_model_that_computes_with_its_logits_keeps_its_plain_head(token_batch):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=61, num_key_value_heads=2, head_dim=16, **sizes)).train()
    model.config.use_cache = False
    assert profile_model(model, token_batch(), CONFIG).heads == ("plain",)
    with pytest.raises(ChunkedHeadError, match=r"something else from its logits .*head=\"plain\""):
        profile_model(model, token_batch(), CHUNKED)


def test_a_policy_puts_its_head_on_and_takes_it_off(wide, run_steps, assert_same_steps):
    model, batch = wide
    profile = profile_model(model, batch, CONFIG)
    plain = run_steps(model, batch, num_steps=1)
    with apply_policy(model, uniform_policy(profile.with_head("chunked"), "recompute")) as handle:
        (ours,) = run_steps(model, batch, num_steps=1)
        assert not torch.equal(ours["loss"], torch.zeros(()))
        torch.testing.assert_close(ours["loss"], plain[0]["loss"], rtol=1e-6, atol=0)  # another order of 256 sums
        assert type(model(**batch).logits) is not torch.Tensor
        handle.replace(uniform_policy(profile, "recompute"))
        assert_same_steps(run_steps(model, batch, num_steps=1), plain)
    assert "forward" not in model.lm_head.__dict__
    assert_same_steps(run_steps(model, batch, num_steps=1), plain)


def test_a_chunked_policy_on_a_model_without_a_head_is_refused(toy_model, toy_batch):
    model = toy_model(lambda block, hidden: hidden + block.down(block.up(hidden).tanh()))
    policy = replace(uniform_policy(profile_model(model, toy_batch(), CONFIG), "recompute"), head="chunked")
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(PolicyMismatchError, match="the policy has a chunked head, and ToyModel has no output layer"):
        apply_policy(model, policy)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_files_keep_the_head(gpt2_like_profile, add_chunked_head, tmp_path):
    profile = add_chunked_head(gpt2_like_profile(num_blocks=2), 100).with_head("chunked")
    policy = uniform_policy(profile, "recompute")
    profile.save(tmp_path / "profile.json"), policy.save(tmp_path / "policy.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert Policy.load(tmp_path / "policy.json") == policy
    assert (
        policy.predicted_overhead_ms == simulate(profile, [policy.plan_of(b.name) for b in profile.blocks]).overhead_ms
    )
