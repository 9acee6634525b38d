"""AdaccTrainerMixin: training equal to plain training and to AdaccCallback, and refusals."""

from functools import partial

import pytest
from transformers import Trainer

from adacc_hf import AdaccCallback, AdaccConfig, AdaccTrainerMixin


class MixedTrainer(AdaccTrainerMixin, Trainer):
    """Trainer with the mixin."""


@pytest.fixture
def mixed_trainer(lossless):
    """The class of a Trainer with the mixin, with settings."""
    return partial(MixedTrainer, adacc_config=AdaccConfig(**lossless))


def test_training_is_equal_to_plain_training_and_to_the_callback(train, mixed_trainer, lossless):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    callback = AdaccCallback(**lossless)
    plain, with_callback = train(**settings), train([callback], **settings)
    run = train(trainer_class=mixed_trainer, **settings)
    run.assert_equals(plain)
    run.assert_equals(with_callback)
    own_callback = run.trainer.adacc_callback
    assert own_callback.policy.action_counts() == callback.policy.action_counts()
    assert own_callback.policy.action_counts()["recompute"] > 0
    assert [event["step"] for event in own_callback.history if event["event"] == "policy"] == [1]


def test_a_second_callback_is_refused(make_trainer, mixed_trainer, lossless):
    with pytest.raises(ValueError, match=r"2 callbacks of class AdaccCallback.*or none if .* has AdaccTrainerMixin"):
        make_trainer([AdaccCallback(**lossless)], trainer_class=mixed_trainer)
    trainer = make_trainer(trainer_class=mixed_trainer)
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
