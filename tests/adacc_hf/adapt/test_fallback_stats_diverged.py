"""DivergedBatches: their majority, their overhead, and the budget that they may exceed."""

import pytest

from adacc_hf.adapt.fallback_stats import DivergedBatches, full_recomputation
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.artifacts.config import AdaccConfig, Budget
from adacc_hf.solve.simple_policies import uniform_policy
from adacc_hf.torch_glue.batch_shapes import TensorShape


def budget_of(setting, reference):
    return Budget.resolve(setting, reference.profile, AdaccConfig())


def shapes_of(samples):
    return (TensorShape("input_ids", (samples, 1024)),)


@pytest.fixture
def reference(gpt2_like_profile):
    profile = gpt2_like_profile()
    return SizePolicy(shapes_of(8), profile, profile, uniform_policy(profile, "retain"), None, 0, profile)


@pytest.fixture
def recomputing(reference):
    return full_recomputation(reference.profile)


@pytest.mark.parametrize(
    ("shares", "is_majority"),
    [([], False), ([1.0], True), ([0.5], False), ([0.6, 0.0], False), ([0.6, 0.0, 1.0], True), ([0.4, 0.4], False)],
)
def test_most_batches_are_more_than_half(shares, is_majority):
    diverged = DivergedBatches([].append)
    for share in shares:
        diverged.add(share)
    assert diverged.has_diverged == bool(shares and shares[-1] > 0.5)
    assert diverged.most_diverged() == is_majority
    assert not diverged.most_diverged(), "each question is about the batches since the last one"


def test_the_overhead_is_that_of_full_recomputation_and_grows_with_the_batch(reference, recomputing):
    said = []
    diverged = DivergedBatches(said.append)
    assert recomputing.predicted_overhead_ms > 0
    for samples in (8, 4, 16):
        overhead = diverged.overhead_ms(shapes_of(samples), reference, budget_of(0.5, reference))
        assert overhead == recomputing.predicted_overhead_ms * samples / 8
    assert not said, "a fraction bounds no peak"


def test_a_budget_that_is_exceeded_is_said_once_with_the_bytes(reference, recomputing, caplog):
    said = []
    diverged = DivergedBatches(said.append)
    budget = recomputing.predicted_peak_bytes - 1000
    for samples in (8, 8, 16):
        diverged.overhead_ms(shapes_of(samples), reference, budget_of(budget, reference))
    (text,) = said
    assert text.startswith("a batch of input_ids 8x1024 did not follow a policy, and takes up to about 1000 bytes more")
    assert f"memory_budget={budget} allows" in text
    assert sum("did not follow a policy" in message for message in caplog.messages) == 1


def test_a_budget_that_may_be_exceeded_is_said_before_one_that_is(reference, recomputing):
    said = []
    diverged = DivergedBatches(said.append)
    budget = recomputing.predicted_peak_bytes
    diverged.overhead_ms(shapes_of(8), reference, budget_of(budget, reference))
    diverged.overhead_ms(shapes_of(9), reference, budget_of(budget, reference))
    assert ["may take more" in text for text in said] == [True, False]


@pytest.mark.parametrize(("ran_planned", "level"), [(False, "INFO"), (True, "WARNING")])
def test_operators_that_no_profile_has_are_a_warning(reference, recomputing, caplog, ran_planned, level):
    """Nothing predicts the memory of these operators under a plan. Under torch's checkpoint, the estimate does."""
    said = []
    diverged = DivergedBatches(said.append)
    caplog.set_level("INFO")
    budget = recomputing.predicted_peak_bytes
    for planned in (ran_planned, ran_planned, False):
        diverged.overhead_ms(shapes_of(8), reference, budget_of(budget, reference), planned)
    assert len(said) == 1
    assert [record.levelname for record in caplog.records] == [level]
