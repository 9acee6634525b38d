"""AdaccCallback: sources of its policy, its log entries, and the settings that it refuses."""

import pytest
import torch
from transformers import TrainerCallback

from adacc_hf import AdaccCallback, AdaccConfig, NestedHooksError, PolicyMismatchError
from adacc_hf.adapt.policy_phases import FixedPolicyPhase
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue.compat import CHECKPOINTING, switch_checkpointing


@pytest.fixture
def profile(train, lossless):
    callback = AdaccCallback(**lossless)
    train([callback], max_steps=2)
    return callback.profile


def test_settings_override_the_config(lossless):
    config = AdaccConfig(memory_budget="1GiB", tracking=32)
    assert AdaccCallback(config, tracking=16).config == AdaccConfig(memory_budget="1GiB", tracking=16)
    with pytest.raises(TypeError, match="memory_limit"):
        AdaccCallback(memory_limit=3)


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_policy_file_is_followed(train, profile, tmp_path, kind):
    policy = random_policy(profile, seed=0)
    policy.save(tmp_path / "policy.json")
    callback = AdaccCallback(policy=kind(tmp_path / "policy.json"))
    train([callback]).assert_equals(train())
    assert callback.policy == policy


def test_a_missing_policy_file_is_named(train, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json does not exist"):
        train([AdaccCallback(policy=tmp_path / "absent.json")])


def test_a_function_of_the_profile_makes_the_policy(train):
    profiles = []

    def recompute_all(profile):
        profiles.append(profile)
        return uniform_policy(profile, "recompute")

    callback = AdaccCallback(policy=recompute_all)
    train([callback])
    assert profiles == [callback.profile]
    assert callback.policy == uniform_policy(callback.profile, "recompute")


def test_a_policy_for_another_model_is_refused(train, make_model, profile):
    callback = AdaccCallback(policy=uniform_policy(profile, "recompute"))
    with pytest.raises(PolicyMismatchError, match=r"for 2 blocks, but GPT2LMHeadModel has 3; it has no plan for"):
        train([callback], model=make_model(n_layer=3))
    with pytest.raises(PolicyMismatchError, match="the model, its attention, dropout or precision differ"):
        train([callback], model=make_model(attn_pdrop=0.0, resid_pdrop=0.0))


class ReferencePass(TrainerCallback):
    """Callback that acts as TRL's pass of a reference model: checkpointing off, a forward, checkpointing on again."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        switch_checkpointing(model, on=False)
        with torch.no_grad():
            model(torch.arange(6)[None])
        switch_checkpointing(model, on=True)


def test_switching_checkpointing_off_and_on_keeps_the_policy(train, lossless):
    class CountCalls(TrainerCallback):
        calls: tuple[int, ...] = ()

        def on_step_end(self, args, state, control, **kwargs):
            if isinstance(callback.session.phase, FixedPolicyPhase):
                functions = callback.session.phase.handle.installation.functions.values()
                self.calls += (sum(function.num_calls for function in functions),)

    callback, count = AdaccCallback(**lossless), CountCalls()
    run = train([callback, ReferencePass(), count], max_steps=6)
    # The policy is set after the first step. Each later step calls each of the two blocks once.
    assert count.calls == (0, 2, 4, 6, 8, 10)
    run.assert_equals(train([ReferencePass()], max_steps=6))


def test_activation_offloading_is_refused(train, lossless):
    with pytest.raises(NestedHooksError, match="inside another pair of saved-tensor hooks"):
        train([AdaccCallback(**lossless)], **{CHECKPOINTING: False}, trainer_class=offloading_trainer())


def offloading_trainer():
    from transformers import Trainer

    class OffloadingTrainer(Trainer):
        def compute_loss(self, *args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return super().compute_loss(*args, **kwargs)

    return OffloadingTrainer
