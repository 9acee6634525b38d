"""SizePolicy: the state that a resumed run gets back, and the event of a tracking step."""

from __future__ import annotations

from adacc_hf import AdaccConfig
from adacc_hf.adapt.checkpoint_files import Saved, load_from_checkpoint, save_in_checkpoint
from adacc_hf.adapt.gradient_check import GradientError
from adacc_hf.adapt.profile_updates import with_more_memory
from adacc_hf.adapt.replanner import Replanner, Tracking
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.solve.simple_policies import uniform_policy


def test_the_prices_that_the_solver_saw_last_come_back(tmp_path, gpt2_like_profile):
    """A resumed run without these prices would call the solver where the interrupted run did not."""
    profile = gpt2_like_profile()
    policy = uniform_policy(profile, "recompute")
    solver_profile, prices = with_more_memory(profile, 1), with_more_memory(profile, 2)
    config = AdaccConfig(memory_budget=0.6)
    size_policy = SizePolicy(None, Replanner(profile, policy, config), None)
    size_policy.replanner.profile, size_policy.replanner.searched = prices, solver_profile
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    save_in_checkpoint(folder, Saved(size_policies=[size_policy.saved()], memory_budget=0.6))
    (record,) = load_from_checkpoint(folder, AdaccConfig(memory_budget=0.6)).size_policies
    resumed = SizePolicy(None, Replanner(record.profile, record.policy, config), None)
    assert resumed.replanner.searched == profile
    resumed.resume(record)
    assert (resumed.replanner.profile, resumed.replanner.searched) == (prices, solver_profile)


def test_a_tracking_step_is_noted_with_its_worst_gradient(gpt2_like_profile):
    profile = gpt2_like_profile()
    policy = uniform_policy(profile, "recompute")
    size_policy = SizePolicy(None, Replanner(profile, policy, AdaccConfig()), None, predicted_step_ms=8.0)
    tracking = Tracking(
        num_outliers={"mlp": 3},
        errors={"mlp": 0.1},
        gradients={0: GradientError(error=0.2, cosine=0.9), 1: GradientError(error=0.1, cosine=0.7)},
        degrading_codecs=frozenset(),
        reason="every 10 steps",
        needs_solving=False,
    )
    event = size_policy.tracked(5, tracking)
    assert (event.step, event.reason, event.num_outliers, event.errors) == (
        5,
        "every 10 steps",
        {"mlp": 3},
        {"mlp": 0.1},
    )
    assert (event.gradient_error, event.gradient_cosine) == (0.2, 0.7)
    assert (event.step_ms, event.predicted_step_ms) == (None, 8.0), "no normal step was timed yet"
    assert event.compression_rate == policy.predicted_stored_bytes / profile.plain_stored_bytes


def test_a_run_that_resumes_keeps_the_tightened_budget_and_the_due_solver(gpt2_like_profile):
    profile = gpt2_like_profile()
    policy = uniform_policy(profile, "recompute")
    config = AdaccConfig(memory_budget=0.9)
    interrupted = SizePolicy(None, Replanner(profile, policy, config, 0.8), None, is_provisional=True)
    interrupted.replanner.num_tracked = 4
    record = interrupted.saved()
    assert (record.prices, record.searched) == (None, None), "they are those of the profile"
    resumed = SizePolicy(None, Replanner(profile, policy, config), None)
    resumed.resume(record)
    assert resumed.replanner.memory_budget == 0.8
    assert resumed.replanner.num_tracked == 4
    assert resumed.is_provisional
    assert resumed.due is None
