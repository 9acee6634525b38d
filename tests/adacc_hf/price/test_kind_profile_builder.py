"""KindProfileBuilder: what blocks of one kind have in common, and kinds without replay."""

import random
import re

import numpy
import pytest
import torch

from adacc_hf import AdaccConfig, InfeasibleBudgetError, apply_policy, profile_model, solve_policy
from adacc_hf.kernels import outlier_int4
from adacc_hf.reports.explain import explain_policy
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.memory import measure_step


def test_outlier_channels_of_the_neediest_block_are_kept(toy_model, toy_batch, monkeypatch):
    """A codec keeps as many outlier channels as the block that needs most, because blocks of one kind share a plan."""
    model, batch = toy_model(lambda block, hidden: block.down(block.up(hidden).tanh()), num_blocks=2), toy_batch(64)
    monkeypatch.setattr(outlier_int4, "ZSCORE_THRESHOLD", 2.5)  # of 8 channels, one is at most 2.65 above the mean

    def num_outliers(outliers):
        profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0, outliers=outliers))
        tanh = next(value for value in profile.kinds[0].activations if value.name.endswith("tanh"))
        return dict(tanh.codecs[0].options)["num_outliers"]

    assert num_outliers(True) == 0
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.01)
        model.layers[1].up.weight[3].fill_(10.0)
        model.layers[1].up.bias.fill_(0.0)
    assert (num_outliers(True), num_outliers(False)) == (1, 0)


# Kinds that run under torch's checkpoint: the profile records their stored bytes and their cost.


CONFIG = AdaccConfig(min_compress_bytes=0)


def reads_data(block, hidden, scale=None, unused=None):
    x = block.up(hidden).tanh()
    x = x / (1 + abs(x.max().item()))
    return hidden + block.down(x if scale is None else x * scale)


@pytest.fixture
def data_reading_model(toy_model, toy_batch):
    """A model whose blocks read data into Python, and a batch that is large next to the random generator's state."""
    return toy_model(reads_data, num_blocks=3, kwargs_of=lambda x: {"scale": x + 1, "unused": x * 2}), toy_batch(64)


@pytest.fixture
def profile(data_reading_model):
    return profile_model(*data_reading_model, CONFIG)


def test_stored_bytes_are_those_of_the_checkpoint(data_reading_model, profile, run_steps, assert_same_steps):
    model, batch = data_reading_model
    plain = run_steps(model, batch)
    assert measure_step(model, batch).stored_bytes == profile.plain_stored_bytes
    policies = [uniform_policy(profile, "recompute"), uniform_policy(profile, "retain"), solve_policy(profile, 0.9)]
    for policy in [*policies, *(random_policy(profile, seed) for seed in range(4))]:
        with apply_policy(model, policy, CONFIG):
            assert_same_steps(run_steps(model, batch), plain)
            memory = measure_step(model, batch)
        assert memory.stored_bytes == policy.predicted_stored_bytes
        assert memory.peak_bytes <= policy.predicted_peak_bytes


def test_the_peak_of_the_checkpoint_is_exact(data_reading_model, profile):
    model, batch = data_reading_model
    policy = uniform_policy(profile, "recompute")
    with apply_policy(model, policy, CONFIG):
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
        assert measure_step(model, batch).peak_bytes == policy.predicted_peak_bytes


def test_the_block_is_one_activation(profile):
    (kind,) = profile.kinds
    assert "_local_scalar_dense" in kind.untrusted
    saved = [value for value in kind.activations if value.saved]
    assert [value.name for value in saved] == ["all that the block saves"]
    assert uniform_policy(profile, "recompute").predicted_overhead_ms == pytest.approx(
        len(profile.blocks) * kind.forward_ms
    )
    assert all(value.codecs == () for value in kind.values)
    assert kind.forward_ms > 0.0
    # The inputs of all blocks, read or not, are held once.
    assert len(profile.shared) == 2


def test_the_explanation_says_why(profile):
    text = explain_policy(uniform_policy(profile, "recompute"), profile)
    assert re.search(r"checkpoint: \d+\.\d\d ms, stores .*; plain: 0\.00 ms, stores", text)
    assert "no replay: blocks of this kind run plainly or under torch's checkpoint, because" in text
    assert "recompute: with the whole block" in text
    assert "_local_scalar_dense" in text


def test_a_checkpoint_that_saves_nothing_is_not_chosen(toy_model, toy_batch):
    """A checkpoint that saves nothing is not chosen: in a tiny block the random generator's state is the larger one."""
    model, batch = toy_model(reads_data), toy_batch(1)
    profile = profile_model(model, batch, CONFIG)
    assert uniform_policy(profile, "recompute").predicted_stored_bytes > profile.plain_stored_bytes
    with pytest.raises(InfeasibleBudgetError):
        solve_policy(profile, 0.99, CONFIG)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
@pytest.mark.parametrize("seed", range(3))
def test_a_block_that_skips_itself_by_chance_is_exact(toy_model, toy_batch, draw, seed):
    def skips(block, hidden):
        return hidden if draw() < 0.5 else hidden + block.down(block.up(hidden).tanh())

    def losses_and_gradients():
        random.seed(seed)
        numpy.random.seed(seed)
        results = []
        for _ in range(4):
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return results, draw()

    model, batch = toy_model(skips, num_blocks=4), toy_batch(64)
    random.seed(seed)
    numpy.random.seed(seed)
    profile = profile_model(model, batch, CONFIG)
    assert all("Python's or numpy's random generators" in kind.untrusted for kind in profile.kinds)
    plain, after = losses_and_gradients()
    for policy in (uniform_policy(profile, "recompute"), solve_policy(profile, 0.9), uniform_policy(profile, "retain")):
        with apply_policy(model, policy, CONFIG):
            ours, our_after = losses_and_gradients()
        assert our_after == after
        assert len(ours) == len(plain)
        assert all(map(torch.equal, ours, plain))


def test_a_block_that_passes_on_what_it_is_given_has_nothing_to_decide(toy_model, toy_batch):
    model, batch = toy_model(lambda block, hidden: hidden), toy_batch(4)
    profile = profile_model(model, batch, CONFIG)
    assert solve_policy(profile, "1GiB").is_plain
