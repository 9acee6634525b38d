"""AdaccTrainerMixin: training equal to plain training and to AdaccCallback, resumed and failed runs, refusals."""

import pytest
import torch
from transformers import Trainer

from adacc_hf import AdaccCallback, AdaccConfig, AdaccTrainerMixin


class MixedTrainer(AdaccTrainerMixin, Trainer):
    """Trainer with the mixin."""


def trained(trainer, **arguments):
    """Train and return the Trainer, before the next one's constructor seeds the random generators."""
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
