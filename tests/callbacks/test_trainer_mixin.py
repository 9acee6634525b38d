"""AdaccTrainerMixin: training equal to plain training and to AdaccCallback, resumed and failed runs, refusals."""

import pytest
import torch
from transformers import Trainer

from adacc_hf import AdaccCallback, AdaccConfig, AdaccTrainerMixin

CHECKPOINTS = {"save_strategy": "steps", "save_steps": 3}


class MixedTrainer(AdaccTrainerMixin, Trainer):
    """Trainer with the mixin."""


class ScaledLoss:
    """Mixin for a Trainer whose user-defined `compute_loss` differs from the model's own loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = 3 * outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class ScaledTrainer(ScaledLoss, Trainer):
    """Plain Trainer with the user's loss."""


class ScaledMixedTrainer(ScaledLoss, AdaccTrainerMixin, Trainer):
    """Trainer with the mixin and the user's loss."""


def trained(trainer, **arguments):
    """Train and return the Trainer. Training comes before the next Trainer's constructor, which seeds the random
    generators."""
    trainer.train(**arguments)
    return trainer


@pytest.fixture
def config(lossless):
    return AdaccConfig(**lossless)


@pytest.fixture
def make_mixed(make_trainer, config):
    """Return `make_mixed(callbacks=None, trainer_class=MixedTrainer, policy=None, **arguments)`, which returns a
    Trainer with the mixin."""

    def make(callbacks=None, trainer_class=MixedTrainer, policy=None, **arguments):
        def with_config(**settings):
            return trainer_class(**settings, adacc_config=config, adacc_policy=policy)

        return make_trainer(callbacks, trainer_class=with_config, **arguments)

    return make


def assert_equal_training(trainer, other_trainer):
    """Assert that losses, gradient norms and final weights are bit-equal."""
    keys = ("loss", "grad_norm", "eval_loss")
    logs, expected = (
        [{k: log[k] for k in keys if k in log} for log in t.state.log_history] for t in (trainer, other_trainer)
    )
    assert logs == expected
    assert any("loss" in log for log in logs)
    weights = other_trainer.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.model.state_dict().items())


def test_training_is_equal_to_plain_training_and_to_the_callback(make_mixed, make_trainer, lossless):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    callback = AdaccCallback(**lossless)
    plain, callback_trainer = trained(make_trainer(**settings)), trained(make_trainer([callback], **settings))
    mixin_trainer = trained(make_mixed(**settings))
    assert_equal_training(mixin_trainer, plain)
    assert_equal_training(mixin_trainer, callback_trainer)
    assert mixin_trainer.adacc_callback.policy.action_counts() == callback.policy.action_counts()
    assert mixin_trainer.adacc_callback.policy.action_counts()["recompute"] > 0
    assert [event["step"] for event in mixin_trainer.adacc_callback.history if event["event"] == "policy"] == [1]


def test_a_compute_loss_of_the_users_class_is_trained_on(make_mixed, make_trainer):
    mixin_trainer = trained(make_mixed(trainer_class=ScaledMixedTrainer))
    plain = trained(make_trainer(trainer_class=ScaledTrainer))
    assert mixin_trainer.adacc_callback.policy.action_counts()["recompute"] > 0
    assert_equal_training(mixin_trainer, plain)


def test_a_resumed_run_continues_with_the_policy_of_its_checkpoint(make_mixed, make_trainer):
    settings = {**CHECKPOINTS, "lr_scheduler_type": "constant"}
    first = trained(make_mixed(max_steps=3, **settings))
    resumed = trained(make_mixed(**settings), resume_from_checkpoint=True)
    plain = trained(make_trainer(lr_scheduler_type="constant"))
    events = [(event["step"], event["event"]) for event in resumed.adacc_callback.history]
    assert events[0] == (1, "policy")
    assert (4, "policy") in events, "the policy is set after the first step, which is recorded"
    assert resumed.adacc_callback.policy == first.adacc_callback.policy
    weights = plain.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in resumed.model.state_dict().items())


def test_a_second_callback_is_refused(make_mixed, lossless):
    with pytest.raises(ValueError, match=r"2 callbacks of class AdaccCallback.*or none if .* has AdaccTrainerMixin"):
        make_mixed([AdaccCallback(**lossless)])
    trainer = make_mixed()
    trainer.add_callback(AdaccCallback(**lossless))
    with pytest.raises(ValueError, match="2 callbacks of class AdaccCallback"):
        trainer.train()
    assert "training_step" not in vars(trainer)


def test_the_mixin_after_the_trainer_is_refused():
    with pytest.raises(TypeError, match=r"write class Reversed\(AdaccTrainerMixin, Trainer\)"):
        type("Reversed", (Trainer, AdaccTrainerMixin), {})


def test_a_wrong_config_is_named(make_trainer):
    with pytest.raises(TypeError, match="is not an AdaccConfig"):
        make_trainer(trainer_class=lambda **settings: MixedTrainer(**settings, adacc_config={"memory_budget": 0.5}))
