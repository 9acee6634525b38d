"""Training with payloads in host memory: exact alone, like its codec after another codec, and without a trace."""

import gc
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_builders import gradients_of

from adacc_hf import AdaccConfig, AdaccSession, InfeasibleBudgetError, apply_policy, profile_model, solve_policy
from adacc_hf.adapt.oom_retry import memory_table
from adacc_hf.adapt.policy_fit import suitable_policy
from adacc_hf.artifacts.host_link import HostLink
from adacc_hf.artifacts.plans import checkpoint_plan
from adacc_hf.artifacts.policy import Choice
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.kernels._host_payloads import ALIGNMENT, HOST, MOST_TENSORS, encoding_of, is_on_host, on_host
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.price import host_copies
from adacc_hf.run.policy_handle import remove_policy
from adacc_hf.solve.simple_policies import policy_of_plans, random_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step

CONFIG = AdaccConfig(min_compress_bytes=0, host_memory="64MiB")
LINK = HostLink(to_host_bytes_per_ms=1e6, to_device_bytes_per_ms=1e6, copy_ms=0.01)
EVERY = ("retain", "recompute", "compress")
SETTINGS = [
    pytest.param(("gpt2", "sdpa", None), id="gpt2-fp32"),
    pytest.param(("gpt2", "eager", torch.bfloat16), id="gpt2-eager-bf16"),
    pytest.param(("llama", "sdpa", torch.bfloat16), id="llama-bf16"),
]
"""Model, attention, autocast."""


def with_link(profile):
    """Return `profile` as measured on a device with memory of its own."""
    return replace(
        profile, kinds=tuple(replace(kind, host_link=LINK) for kind in profile.kinds), host_free_bytes=1 << 30
    )


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request, tiny_gpt2, tiny_llama, token_batch):
    """(model, batch, autocast, profile with a link to the host)."""
    name, attention, autocast = request.param
    model, batch = {"gpt2": tiny_gpt2, "llama": tiny_llama}[name](attention, 3), token_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        return model, batch, autocast, with_link(profile_model(model, batch, CONFIG))


@pytest.fixture(autouse=True)
def no_host_memory_is_left():
    yield
    gc.collect()
    assert (host_pool.live_bytes, host_pool.nbytes) == (0, 0)


def on_device(policy, profile):
    """Return `policy` with each codec in host memory replaced by the same codec on the device."""

    def moved(choice):
        return choice if choice.codec in (None, HOST) else replace(choice, codec=encoding_of(choice.codec))

    plans = [policy.plan_of(block.name) for block in profile.blocks]
    plans = [replace(plan, choices=tuple((v, moved(choice)) for v, choice in plan.choices)) for plan in plans]
    return policy_of_plans(profile, plans)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_lossless_policies_with_host_memory_train_exactly(setting, run_steps, assert_same_steps, seed):
    model, batch, autocast, profile = setting
    plain = run_steps(model, batch, autocast=autocast)
    policy = random_policy(profile, seed, EVERY, lossless=True, whole_blocks=True)
    with apply_policy(model, policy):
        host_pool.take_peak()
        assert_same_steps(run_steps(model, batch, autocast=autocast), plain)
        num = sum(
            is_on_host(choice.codec or "") for _, plan in policy.blocks for _, choice in policy.plans[plan].choices
        )
        least = policy.predicted_host_bytes - num * (MOST_TENSORS - 1) * ALIGNMENT
        assert least <= host_pool.take_peak() <= policy.predicted_host_bytes
        assert host_pool.nbytes == policy.predicted_host_bytes
        assert host_pool.live_bytes == 0


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_codecs_in_host_memory_give_the_gradients_of_the_codecs(setting, run_steps, assert_same_steps, seed):
    model, batch, autocast, profile = setting
    policy = random_policy(profile, seed, EVERY)
    assert policy.predicted_host_bytes > 0
    with apply_policy(model, on_device(policy, profile)):
        expected = run_steps(model, batch, autocast=autocast)
    with apply_policy(model, policy):
        assert_same_steps(run_steps(model, batch, autocast=autocast), expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_device_stores_what_is_predicted(setting, run_steps, seed):
    model, batch, autocast, profile = setting
    policy = random_policy(profile, seed, EVERY)
    with apply_policy(model, policy):
        run_steps(model, batch, num_steps=2, autocast=autocast)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
            assert measure_step(model, batch).stored_bytes == policy.predicted_stored_bytes


@pytest.fixture
def gpt2(tiny_gpt2, token_batch):
    """(model, batch, profile with a link to the host, policy that moves everything)."""
    model, batch = tiny_gpt2("sdpa", 3), token_batch()
    profile = with_link(profile_model(model, batch, CONFIG))
    return model, batch, profile, uniform_policy(profile, "compress", HOST)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_a_policy_is_used_at_sizes_at_which_host_memory_suffices(gpt2, missing_bytes):
    _, _, profile, policy = gpt2
    config = replace(CONFIG, host_memory=policy.predicted_host_bytes - missing_bytes)
    assert (suitable_policy(policy, profile, config) is None) == bool(missing_bytes)


@pytest.mark.parametrize("codec", [HOST, on_host("int8")])
def test_checkpointed_blocks_store_their_inputs_in_host_memory(gpt2, run_steps, assert_same_steps, codec):
    model, batch, profile, _ = gpt2
    kind = profile.kinds[0]
    (option,) = (option for option in kind.codec_options(kind.inputs[0].index) if option.codec == codec)
    plan = checkpoint_plan(kind, {kind.inputs[0].index: Choice.compress(option)})
    policy = policy_of_plans(profile, [plan] * len(profile.blocks))
    assert policy.predicted_host_bytes == 3 * option.host_bytes
    with apply_policy(model, on_device(policy, profile) if codec != HOST else checkpointed(profile)):
        expected = run_steps(model, batch)
    with apply_policy(model, policy):
        host_pool.take_peak()
        assert_same_steps(run_steps(model, batch), expected)
        least = policy.predicted_host_bytes - 3 * (MOST_TENSORS - 1) * ALIGNMENT
        assert least <= host_pool.take_peak() <= policy.predicted_host_bytes


def checkpointed(profile):
    return policy_of_plans(profile, [checkpoint_plan(profile.kinds[0])] * len(profile.blocks))


def test_training_is_exact_after_an_interrupted_backward(gpt2, run_steps, assert_same_steps):
    """On a CPU, torch keeps a part of the interrupted graph alive, with or without a policy."""
    model, batch, _, policy = gpt2
    plain = run_steps(model, batch)

    class BrokenOffError(Exception):
        pass

    def interrupt(gradient):
        raise BrokenOffError

    with apply_policy(model, policy):
        run_steps(model, batch, num_steps=2)
        loss = model(**batch).loss
        assert host_pool.live_bytes > 0
        handle = model.transformer.h[1].mlp.c_fc.weight.register_hook(interrupt)
        with pytest.raises(BrokenOffError):
            loss.backward()
        handle.remove()
        del loss
        gc.collect()
        assert host_pool.live_bytes < host_pool.nbytes / 2
        assert_same_steps(run_steps(model, batch), plain)


def test_a_forward_without_a_backward_frees_the_payloads(gpt2):
    model, batch, _, policy = gpt2
    with apply_policy(model, policy):
        loss = model(**batch).loss
        assert host_pool.live_bytes > 0
        del loss
        gc.collect()
        assert host_pool.live_bytes == 0


def test_a_backward_after_the_policy_was_removed_is_exact(gpt2):
    model, batch, _, policy = gpt2
    _, *plain = gradients_of(model, batch)
    apply_policy(model, policy)
    torch.manual_seed(0)
    loss = model(**batch).loss
    remove_policy(model)
    assert host_pool.nbytes == 0, "the pool belongs to the payloads alone"
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], plain))
    model.zero_grad(set_to_none=True)


# The whole path: offered, priced, solved and run, on a CPU that passes for a device with memory of its own.


@pytest.fixture
def separate(monkeypatch):
    monkeypatch.setattr(host_copies, "has_own_memory", lambda device: True)


def test_a_cpu_stores_nothing_in_host_memory(gpt2):
    model, batch, _, _ = gpt2
    profile = profile_model(model, batch, CONFIG)
    assert profile.host_free_bytes == 0
    assert all(kind.host_link is None for kind in profile.kinds)
    assert solve_policy(profile, 0.2, CONFIG).predicted_host_bytes == 0


@pytest.mark.usefixtures("separate")
def test_a_session_uses_host_memory_logs_it_and_frees_it(tiny_gpt2, token_batch, caplog):
    model, batch = tiny_gpt2("sdpa", 3), token_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = AdaccSession(
        model, optimizer, CONFIG, memory_budget=0.15, actions=("retain",), tracking="off", head="plain"
    )
    host_pool.take_peak()
    for _ in range(3):
        with session.step(batch):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    policy, metrics = session.policy, session.metrics()
    codecs = {choice.codec for plan in policy.plans for _, choice in plan.choices if choice.codec}
    assert codecs <= {HOST, "bitmask", on_host("bitmask")}
    assert policy.predicted_host_bytes > 0
    assert metrics["adacc/host_gib"] == policy.predicted_host_bytes / 2**30
    assert 0.9 * policy.predicted_host_bytes < metrics["adacc/measured_host_gib"] * 2**30 <= policy.predicted_host_bytes
    assert session.history[0]["host_bytes"] == policy.predicted_host_bytes
    table = memory_table(model, optimizer, policy, session.profile)
    assert "pool of host memory" in table
    assert "planned: payloads in host memory" in table
    session.close()
    assert host_pool.nbytes == 0


@pytest.mark.parametrize("is_session", [False, True])
def test_a_model_that_is_dropped_with_its_policy_frees_its_host_memory(gpt2, tiny_gpt2, is_session):
    """The fixture `no_host_memory_is_left` checks it."""
    _, batch, _, policy = gpt2
    model = tiny_gpt2("sdpa", 3)
    if is_session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = AdaccSession(model, optimizer, CONFIG, memory_budget="auto", policy=policy)
        with session.step(batch):
            model(**batch).loss.backward()
            optimizer.step()
        assert host_pool.nbytes == policy.predicted_host_bytes
        assert session.policy is policy
        return
    apply_policy(model, policy, CONFIG)
    model(**batch).loss.backward()
    assert host_pool.nbytes == policy.predicted_host_bytes > 0


@pytest.mark.usefixtures("separate")
def test_a_checkpoint_with_host_memory_is_not_resumed_without_it(tiny_gpt2, token_batch, tmp_path, caplog, monkeypatch):
    model, batch = tiny_gpt2("sdpa", 2), token_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def session(**settings):
        return AdaccSession(
            model, optimizer, min_compress_bytes=0, memory_budget=0.15, actions=("retain",), head="plain", **settings
        )

    with session(host_memory="64MiB") as first:
        with first.step(batch):
            model(**batch).loss.backward()
            optimizer.step()
        first.save(tmp_path)
    with session(host_memory="64MiB") as same:
        assert same.load(tmp_path)
    monkeypatch.setattr(host_copies, "free_host_bytes", lambda: 1 << 17)
    for host_memory in (None, "64MiB"):
        with session(host_memory=host_memory) as other:
            assert other.load(tmp_path)
            model.zero_grad()
            with pytest.raises(InfeasibleBudgetError):
                other.run(lambda batch: (model(**batch).loss.backward(), optimizer.step()), batch)
    assert len(re.findall("was saved under .*host_memory='64MiB'.*, and not under .*: solving again", caplog.text)) == 1


@pytest.mark.parametrize("setting", [None, "64KiB"])
@pytest.mark.parametrize("is_function", [False, True])
def test_a_users_policy_keeps_to_host_memory(gpt2, setting, is_function):
    model, batch, _, policy = gpt2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = (lambda profile: policy) if is_function else policy
    session = AdaccSession(model, optimizer, policy=source, host_memory=setting, min_compress_bytes=0)
    text = f"host_memory={setting!r} allows .*stores {format_bytes(policy.predicted_host_bytes)}"
    with pytest.raises(ValueError, match=text), session.step(batch):
        model(**batch).loss.backward()
    session.detach()
    assert host_pool.nbytes == 0
