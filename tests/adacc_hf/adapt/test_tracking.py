"""Tracking: the measurements of a tracking step, the policies that follow from them, and suspicious figures in logs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

import adacc_hf.adapt.gradient_check as gradient_module
import adacc_hf.adapt.policy_fit as fit_module
from adacc_hf import Action, AdaccConfig, profile_model, solve_policy
from adacc_hf.adapt.corrections import SWITCHED_OFF, by_index
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.run_profiler import TrainingLoop
from adacc_hf.adapt.run_state import RunState
from adacc_hf.adapt.tracking import MIN_LOSSES, WINDOW, LossHistory, Tracking, lossy_blocks
from adacc_hf.artifacts.exact_recompute_rules import DEGRADED_ERROR
from adacc_hf.artifacts.policy import RETAIN
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.solve.simple_policies import uniform_policy

NORM = "GPT2Block.ln_2:native_layer_norm"
"""The input of c_fc, where outliers are planted by the norm's bias."""

pytestmark = pytest.mark.usefixtures("one_thread")

COMPRESS = AdaccConfig(actions=("retain", "compress"), min_compress_bytes=4096, memory_budget=0.45)
"""Settings that compress everything in the tiny model but the norms' statistics."""


@pytest.fixture
def model():
    """A model without dropout, because outlier channels must not depend on a random draw."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM", "use_cache": False}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=32, vocab_size=97, **tokens, **dropout)
    ).train()


@pytest.fixture
def batch():
    ids = torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


class Session:
    """A model under a policy with its tracking, run step by step."""

    def __init__(self, model, batch, config, policy=None):
        self.model, self.batch, self.config = model, batch, config
        self.profile = profile_model(model, batch, config)
        first = policy(self.profile) if policy else solve_policy(self.profile, config=config)
        self.handle = PolicyHandle(model, first)
        self.run = RunState(config, None, model, None, TrainingLoop())
        self.choice = PolicyChoice(self.handle, self.run)
        self.record = self.choice.add(self.profile, first)
        self.tracking = Tracking(self.choice, self.run, 0)
        self.step()  # record the tapes: codecs do not encode a block's first call

    @property
    def policy(self):
        return self.record.policy

    def step(self):
        self.model(**self.batch).loss.backward()
        gradient = self.model.transformer.h[0].mlp.c_fc.weight.grad.clone()
        self.model.zero_grad()
        return gradient

    def finish(self, budget=None, stays=False):
        """End a tracking step, after which the policy `stays`, or the budget is `budget`. Return the step's results,
        and the event of the policy that followed, or None."""
        corrections = self.run.corrections
        corrections.tightened = budget or corrections.tightened
        profile = self.record.profile
        with mock.patch.object(self.choice, "refresh") if stays else nullcontext():
            observed = self.tracking.finish()
        self.record.version, self.tracking.suspicion = corrections.version, None
        (change, *_) = [*(event for event in self.run.history if event["event"] == "change"), None]
        (event,) = [event for event in self.run.history if event["event"] == "tracking"]
        self.run.history.clear()
        codecs = set(by_index(profile, dict.fromkeys(observed.degrading_codecs, 0)))
        return SimpleNamespace(**{"gradient_error": None} | event, degrading_codecs=codecs), change

    def track(self, budget=None, stays=False):
        """Run a tracking step."""
        self.tracking.start()
        self.step()
        return self.finish(budget, stays)

    def observe(self):
        """Run a tracking step after which the policy stays."""
        return self.track(stays=True)[0]

    def follow(self, policy):
        self.record.policy, self.record.plans = policy, self.handle.prepare(policy, self.record.plans)
        self.handle.follow(self.record.plans)

    @property
    def sampled(self):
        """Names of the blocks whose gradients are compared after the next step."""
        return [name for name, strategy in self.handle.plans.strategies.items() if strategy.observer is not None]

    @property
    def allowed_profile(self):
        """Profile that the solver is given now."""
        return self.run.corrections.applied(self.profile, None)


def compress_all(profile):
    return uniform_policy(profile, "compress")


def plant(model, channels):
    """Make `channels` the only outliers of both blocks' ln_2. K equal ones of 64 have Z = sqrt(64/K - 1)."""
    for block in model.transformer.h:
        block.ln_2.bias.data.zero_()
        block.ln_2.bias.data[list(channels)] = 30.0


def norm_options(profile, policy):
    """Return the profile's codec for ln_2's output, and the options that the policy uses for it."""
    (value,) = (value for value in profile.kinds[0].values if value.name == NORM.partition(".")[2] and value.codecs)
    return value.codecs[0], dict(policy.plans[0].choice(value.index).options)


def test_outliers_that_appear_and_vanish_change_counts_prices_and_policy(model, batch, monkeypatch):
    monkeypatch.setattr(fit_module, "solve_policy", lambda profile, *_: compress_all(profile))
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    option, before = norm_options(session.profile, session.policy)
    assert before["num_outliers"] == 0
    for channels in ([5, 40], [5], []):
        plant(model, channels)
        tracking, _ = session.track()
        assert tracking.num_outliers[NORM] == len(channels)
        repriced_option, policy_options = norm_options(session.record.profile, session.policy)
        assert policy_options["num_outliers"] == len(channels)
        # A raw channel takes 4 bytes for each of 4 x 32 tokens, and 4 for its index.
        assert repriced_option.nbytes == option.nbytes + len(channels) * (4 * 32 * 4 + 4)
        assert dict(repriced_option.options)["num_outliers"] == len(channels)


@pytest.mark.parametrize("over", [False, True], ids=["fits", "bursts"])
def test_only_a_burst_budget_changes_the_actions_at_once(model, batch, monkeypatch, over):
    """A policy that fits and leaves memory unused is solved again when that pays."""
    plant(model, [] if over else range(4))
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    other = changed_in_one(session.policy.plans)
    solved = replace(uniform_policy(session.profile, "retain"), plans=other)
    monkeypatch.setattr(fit_module, "solve_policy", lambda *_: solved)
    plant(model, [5] if over else [])
    session.track(session.policy.predicted_stored_bytes / session.profile.plain_stored_bytes if over else None)
    assert (session.policy.plans == other, session.record.num_waiting) == ((True, 0) if over else (False, 1))


def changed_in_one(plans):
    """Return `plans` with the first activation retained."""
    return tuple(
        replace(plan, choices=tuple((v, RETAIN if c.action is Action.COMPRESS else c) for v, c in plan.choices))
        for plan in plans
    )


@pytest.mark.parametrize("is_fraction", [True, False], ids=["fraction", "bytes"])
def test_a_fraction_gives_way_where_only_degraded_gradients_keep_to_it(model, batch, caplog, is_fraction):
    config = replace(COMPRESS, codecs=("channel_int4",))
    session = Session(model, batch, replace(config, memory_budget=1.0), policy=compress_all)
    least, plain = session.policy.predicted_stored_bytes, session.profile.plain_stored_bytes
    sharpen(model)
    session.track(least / plain if is_fraction else session.policy.predicted_peak_bytes)
    assert session.policy.predicted_stored_bytes > least
    assert "any more, training continues with the least memory: memory_budget=" in caplog.text
    assert (session.observe().gradient_error or 0.0) < DEGRADED_ERROR  # None: the budget has no room to compare


def test_the_most_of_all_blocks_and_calls_counts(model, batch):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    session.tracking.start()
    plant(model, [3])
    session.step()
    model.transformer.h[1].ln_2.bias.data[[9, 10]] = 30.0
    session.step()
    plant(model, [])
    session.step()
    assert session.finish()[0].num_outliers[NORM] == 3


def test_errors_of_round_trips_and_of_a_gradient_are_measured(model, batch):
    plant(model, [5, 40])
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    tracking = session.observe()
    compressed = [c for _, c in session.policy.plans[0].choices if c.codec is not None]
    assert len(tracking.errors) == len(compressed)
    # INT4 in groups of 64 leaves a relative error of 0.05 to 0.2 on data without outliers; 8 bits leave 16 times less.
    assert all(0.001 < error < 0.3 for error in tracking.errors.values())
    assert 0.0 < tracking.gradient_error < 0.5


def test_sampled_blocks_take_turns_and_tracking_leaves_no_trace(model, batch):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    sample_names = []
    for _ in range(3):
        session.tracking.start()
        sample_names += session.sampled
        session.step()
        session.finish()
        strategies = session.handle.plans.strategies.values()
        assert all(strategy.wrap_codec is None and strategy.observer is None for strategy in strategies)
    assert sample_names == ["transformer.h.0", "transformer.h.1", "transformer.h.0"]


def test_measuring_changes_no_gradient(model, batch):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0, outliers=False), policy=compress_all)
    session.step()
    before = session.step()
    session.tracking.start()
    state = torch.get_rng_state()
    during = session.step()
    session.finish()[0]
    assert torch.equal(before, during)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("num_steps", [0, 20], ids=["not-checked-yet", "before-a-check"])
def test_comparing_a_gradient_is_no_call_of_the_block(model, batch, num_steps):
    """Comparing a gradient does not count as a call of the block. Recorded calls go by that number."""
    session = Session(model, batch, replace(COMPRESS, max_error=0.05), policy=compress_all)
    for _ in range(num_steps):
        session.step()
    tracking = session.observe()
    assert tracking.gradient_error, "compared, several times for the bound"
    executors = session.handle.plans.strategies.values()
    next_calls = [next(entry.calls) for executor in executors for entry in executor.entries.recorded.values()]
    assert next_calls == [num_steps + 3] * 2


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["torch", "allocator"],
)
def test_a_comparison_that_runs_out_of_memory_is_left_out(model, batch, monkeypatch, caplog, error):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    session.tracking.start()
    session.step()

    def full(*_):
        raise error

    monkeypatch.setattr(gradient_module, "preserve_random_states", full)  # around each run of the graph
    tracking = session.finish()[0]
    assert (tracking.gradient_error, bool(tracking.errors)) == (None, True)
    assert "gradient of transformer.h.0 is not compared with the exact one: there is not enough memory" in caplog.text
    assert all(strategy.wrap_codec is None for strategy in session.handle.plans.strategies.values())


QKV = "attn.c_attn:addmm"
"""The queries, keys and values of fused attention, from which backward recomputes its softmax."""


def sharpen(model, factor=20.0):
    """Scale queries and keys so that attention concentrates on few tokens, as in trained models."""
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[:, : 2 * block.attn.split_size] *= factor


def test_a_degraded_gradient_ends_the_codec_that_degrades_it_and_no_other(model, batch):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    sharpen(model)
    tracking, change = session.track()
    ((_, value, codec),) = tracking.degrading_codecs
    assert session.profile.kinds[0].values[value].name == QKV
    assert codec == "channel_int4"
    assert tracking.gradient_error > DEGRADED_ERROR
    assert change["reason"] == SWITCHED_OFF
    # The solver can meet this budget without compression, so forbidden codecs do not matter.
    everything = compress_all(session.allowed_profile)
    assert [plan.choice(value).codec for plan in everything.plans] == [None]
    session.follow(everything)
    later = session.observe()
    assert later.gradient_error < DEGRADED_ERROR
    assert tracking.errors.keys() - later.errors.keys() == {f"GPT2Block.{QKV}"}
    assert not later.degrading_codecs


def test_the_block_that_was_found_degraded_is_looked_at_again(model, batch):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    assert sampled_of_every_kind(session) == ["transformer.h.0"]
    model.transformer.h[1].attn.c_attn.weight.data[:, :128] *= 20.0
    assert not session.observe().degrading_codecs
    assert session.observe().degrading_codecs
    assert sampled_of_every_kind(session) == ["transformer.h.1"]


def test_a_check_of_every_kind_stays_within_a_byte_budget(model, batch, tiny_budgets):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    needed = gradient_module.check_peaks(session.record.profile, session.policy)["transformer.h.0"]
    for budget, names in ((needed, ["transformer.h.0"]), (needed - 1, [])):
        session.run.corrections.tightened = budget
        assert sampled_of_every_kind(session) == names


def sampled_of_every_kind(session):
    """Return the blocks that a check of all kinds compares, and leave the turns of the others as they are."""
    session.tracking.suspicion = "a check"
    session.tracking.start()
    names = session.sampled
    session.tracking.cancel()
    session.tracking.num_tracked -= 1
    session.tracking.suspicion = None
    return names


def count_runs(monkeypatch, most=None):
    """Return the blocks that run for a comparison, one for each run. After `most` runs, memory runs out."""
    blocks = []
    original = gradient_module.rerun_gradients

    def rerun(call, run_call):
        blocks.append(call.block)
        if most is not None and len(blocks) > most:
            raise torch.OutOfMemoryError("full")
        return original(call, run_call)

    monkeypatch.setattr(gradient_module, "rerun_gradients", rerun)
    return blocks


def test_a_search_that_runs_out_of_memory_ends_lossy_compression_of_the_kind(model, batch, monkeypatch, caplog):
    session = Session(model, batch, replace(COMPRESS, memory_budget=1.0), policy=compress_all)
    sharpen(model)
    session.tracking.start()
    session.step()
    count_runs(monkeypatch, most=4)
    tracking = session.finish()[0]
    options = [(v.index, o) for v in session.profile.kinds[0].values for o in v.codecs if not o.lossless]
    assert tracking.degrading_codecs == {(0, v, o.codec) for v, o in options}
    assert "the codecs that degrade the gradient of transformer.h.0 cannot be determined" in caplog.text
    assert not lossy_blocks(session.policy)


def test_a_codec_that_degraded_a_gradient_is_not_taken_again_for_its_round_trips(model, batch):
    """A codec that degraded a gradient is not selected again for its small round-trip error. Under a bound, INT8
    follows."""
    session = Session(model, batch, replace(COMPRESS, memory_budget=0.27, max_error=0.2), policy=compress_all)
    sharpen(model, factor=12.0)
    tracking, _ = session.track()
    ((_, value, codec),) = tracking.degrading_codecs
    assert codec == "channel_int4"
    for channels in ([5], [5, 40], []):
        assert {plan.choice(value).codec for plan in session.policy.plans} == {"int8"}
        plant(model, channels)  # otherwise the solver would not run again
        session.track()
    assert "channel_int4" not in {option.codec for option in session.record.profile.kinds[0].values[value].codecs}


STEADY = [3.0, 3.1, 2.9, 3.05, 2.95] * 4


def reasons(losses):
    history = LossHistory()
    return [history.check(loss, None) for loss in losses]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_suspicious_at_once_and_enters_no_median(name, value):
    history = LossHistory()
    figures = {"loss": 3.0, "grad_norm": 1.0} | {name: value}
    assert history.check(figures["loss"], figures["grad_norm"]) == f"{name} is {value}"
    later = [*STEADY[: MIN_LOSSES - 1], 100.0]
    assert [history.check(loss, None) for loss in later] == [None] * MIN_LOSSES


def test_a_spike_is_found_and_what_came_before_is_not():
    assert reasons([*STEADY, 9.0, 3.0]) == [None] * 20 + ["loss 9 is 3.0 times the median of the last 16", None]


def test_a_loss_that_stays_where_it_rose_to_is_normal_half_a_window_later():
    results = reasons([*STEADY, *[9.0] * 20])
    assert all(results[20 : 20 + WINDOW // 2])
    assert not any(results[20 + WINDOW // 2 + 1 :])


@given(st.lists(st.floats(-1.0, 1.0), min_size=MIN_LOSSES, max_size=WINDOW), st.floats(1.0, 4.0))
def test_nothing_within_the_range_of_noise_around_zero_is_a_spike(losses, scale):
    """Values within the noise around zero are no spike: if losses alternate in sign, the noise is their size."""
    signs = [scale * (-1) ** number + loss / 4 for number, loss in enumerate(losses)]
    assert reasons([*signs, 1.5 * scale])[-1] is None


@pytest.mark.parametrize(("loss", "is_spike"), [(-4.0, False), (1.0, True)])
def test_losses_below_zero_spike_upwards(loss, is_spike):
    (*_, reason) = reasons([-5.0, -5.1, -4.9, -5.05, loss])
    assert (reason == f"loss {loss:.4g} is far above -5.025, the median of the last 4") == is_spike
    assert (reason is not None) == is_spike
