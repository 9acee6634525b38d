"""Predicted costs of micro-batches of any size, compared with profiles of these sizes."""

import pytest
from transformers import GPT2Config

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.size_model import joined
from adacc_hf.estimate.devices import find_device
from adacc_hf.estimate.fake_model import Workload, fake_model
from adacc_hf.estimate.static_memory import PRECISIONS
from adacc_hf.solve.batch_costs import BatchCosts, longest_fitting, with_samples
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.solve.solver import quick_least_policy, recomputing_policies

CONFIG = AdaccConfig(exact=True)
TOKENS = (("input_ids", (1, 32)), ("labels", (1, 32)))


@pytest.fixture(scope="module")
def measured():
    """Return (a profile that predicts other sizes, profiles traced at some of these)."""
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=512, vocab_size=500, bos_token_id=0, eos_token_id=0)
    device, precision = find_device("a100"), PRECISIONS["fp32"]
    workload = Workload(config=config, device=device, precision=precision, trace="cpu", adacc=CONFIG)
    with fake_model(workload) as model:
        sizes = ((4, 64), (2, 128), (2, 64), (8, 32), (3, 32), (6, 96))
        profile = joined([model.profile(*size) for size in sizes])
        bound = dict(profile.sizes.size_class(with_samples(TOKENS, 5)))["input_ids"]
        return profile, {size: model.profile(*size) for size in (bound, (8, 64), (1, 200))}


def length(number):
    return tuple((name, (1, number)) for name, _ in TOKENS)


def test_costs_are_those_of_a_profile_of_the_size_class(measured):
    profile, traced = measured
    costs = BatchCosts(profile, CONFIG, 2**40)
    plain = uniform_policy(next(iter(traced.values())), "retain").predicted_peak_bytes
    assert plain <= costs.peak(5, TOKENS) <= 1.02 * plain
    assert costs.ms(5, TOKENS) < costs.ms(10, TOKENS)


def test_a_budget_between_the_peaks_costs_recomputation(measured):
    profile, every = measured
    traced = every[8, 64]
    plain, least = uniform_policy(traced, "retain"), recomputing_policies(traced, CONFIG)[0]
    middle = (plain.predicted_peak_bytes + least.predicted_peak_bytes) // 2
    free, tight = (BatchCosts(profile, CONFIG, budget) for budget in (2**40, middle))
    assert 0 < tight.ms(8, length(64)) - free.ms(8, length(64)) < least.predicted_overhead_ms
    assert tight.peak(8, length(64)) == tight.budget_bytes
    assert BatchCosts(profile, CONFIG, least.predicted_peak_bytes // 2).ms(8, length(64)) is None


def test_more_samples_than_fit_do_not_fit(measured):
    profile, traced = measured
    costs = BatchCosts(profile, CONFIG, recomputing_policies(traced[8, 64], CONFIG)[0].predicted_peak_bytes * 21 // 20)
    fits = [costs.ms(number, length(64)) is not None for number in range(1, 40)]
    assert fits == sorted(fits, reverse=True)
    assert fits[7]
    assert not fits[-1]


def test_the_longest_sample_that_fits_alone(measured):
    profile, traced = measured
    costs = BatchCosts(profile, CONFIG, quick_least_policy(traced[1, 200], CONFIG).predicted_peak_bytes * 102 // 100)
    longest = longest_fitting(costs, length, 500)
    assert 180 < longest < 300
    assert costs.fits_alone(length(longest))
    assert not costs.fits_alone(length(longest + 1))


def test_other_tensors_are_not_predicted(measured):
    costs = BatchCosts(measured[0], CONFIG, 2**40)
    assert costs.ms(2, TOKENS[:1]) is None
    assert costs.peak(2, TOKENS[:1]) is None
