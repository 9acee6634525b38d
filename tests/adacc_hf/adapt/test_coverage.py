"""Runs with `on_uncovered="error"`: a block that would train without a policy ends the run, and leaves no trace."""

from __future__ import annotations

import random
import re

import pytest
import torch
from run_builders import InOrder, Lengths, refuse_profiles_of
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from adacc_hf import AdaccCallback, AdaccConfig, AdaccSession
from adacc_hf.adapt import run_profiler
from adacc_hf.adapt.policy_checks import refuse_fallbacks
from adacc_hf.artifacts.errors import UncoveredBlockError

LOSSLESS = {"actions": ("retain", "recompute"), "memory_budget": 0.6}
COVERED = {**LOSSLESS, "on_uncovered": "error"}


@pytest.fixture
def unreplayable(monkeypatch):
    """Let the blocks of each GPT-2 draw a random number of Python, as stochastic depth does."""
    original = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda mlp, hidden: original(mlp, hidden) * (1.0 + 0.0 * random.random()))


def attributes(model):
    """Return what a session could leave on a model: hooks, attributes and functions of its modules."""
    skipped = ("_parameters", "_buffers", "_modules", "training")
    return {
        name: {key: repr(value) for key, value in vars(module).items() if key not in skipped}
        for name, module in model.named_modules()
    }


def test_blocks_that_cannot_be_replayed_end_the_run_after_its_first_step(
    make_trainer, make_model, unreplayable, traces
):
    trainer = make_trainer([AdaccCallback(**COVERED)], model=make_model())
    modules = {name: {**entries} for name, entries in traces(trainer)["modules"].items()}
    with pytest.raises(UncoveredBlockError) as error:
        trainer.train()
    text = str(error.value)
    assert text.startswith(
        "on_uncovered='error' allows no block without a policy, but 2 blocks (transformer.h.0, transformer"
    )
    assert "random generators" in text
    assert "docs/LIMITS.md" in text
    assert text.endswith("set on_uncovered='warn'")
    assert trainer.state.global_step == 1
    after = traces(trainer)["modules"]
    assert {name: after[name] for name in modules if name.startswith("transformer.h")} == {
        name: entries for name, entries in modules.items() if name.startswith("transformer.h")
    }


class PaddedInStep3(torch.utils.data.Dataset):
    """Rows of 32 tokens, with masked tokens only in the batch of the third step."""

    def __init__(self):
        self.rows = Lengths([32] * 5)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        mask = torch.ones(32, dtype=torch.long)
        if 8 <= index < 12:
            mask[28 + index % 4 :] = 0
        return {**self.rows[index], "attention_mask": mask}


def test_a_call_with_other_operators_ends_the_run_in_its_micro_batch(make_trainer, make_model):
    model = make_model()
    trainer = make_trainer([AdaccCallback(**COVERED)], model=model, trainer_class=InOrder)
    trainer.train_dataset = PaddedInStep3()
    before = attributes(model.transformer.h)
    with pytest.raises(UncoveredBlockError, match=r"2 blocks \(transformer\.h\.0, transformer\.h\.1\) .*: other oper"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert attributes(model.transformer.h) == before


def test_a_size_without_a_policy_ends_the_run_before_its_forward(make_trainer, make_model, monkeypatch, late_policy):
    """The first batches have one size, so that the profile predicts no other size."""
    refuse_profiles_of(32, monkeypatch)
    trainer = make_trainer([AdaccCallback(**COVERED)], model=make_model(), trainer_class=InOrder, max_steps=4)
    trainer.train_dataset = Lengths([16, 16, 16, 32])
    with pytest.raises(UncoveredBlockError, match=r"all blocks .* no profile predicts batches of input_ids 4x32"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_steps_before_the_policy_are_allowed_up_to_profile_steps(train, late_policy):
    callback = AdaccCallback(**COVERED)
    train([callback])
    assert [event["fallback_steps"] for event in callback.history if event["event"] == "policy"] == [2]


def test_a_run_that_ends_before_its_policy_is_warned_about(train, late_policy, caplog):
    """An error after the last step would be of no use: the steps up to `profile_steps` are allowed."""
    train([AdaccCallback(**COVERED)], max_steps=1)
    assert re.search(r"ended after 1 step, before a policy was set.*profile_steps=2", caplog.text)


def test_a_profile_that_must_wait_longer_is_an_error(train, late_policy, monkeypatch):
    monkeypatch.setattr(run_profiler, "is_profiling", lambda: True)
    with pytest.raises(UncoveredBlockError, match="let a torch profiler end"):
        train([AdaccCallback(**COVERED)])


def step(session, model, optimizer, batch):
    with session.step(batch):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def batch_of(length):
    ids = torch.arange(4 * length).reshape(4, length) % 97
    return {"input_ids": ids, "labels": ids}


def test_an_own_loop_gets_its_model_back(make_model, unreplayable):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = attributes(model)
    session = AdaccSession(model, optimizer, **COVERED)
    with pytest.raises(UncoveredBlockError, match=r"2 blocks \(transformer\.h\.0, transformer\.h\.1\)"):
        step(session, model, optimizer, batch_of(32))
    assert session.is_closed
    assert attributes(model) == before
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(RuntimeError, match="this AdaccSession is closed"):
        step(session, model, optimizer, batch_of(32))
    model(**batch_of(32)).loss.backward()  # plain training goes on


def test_a_step_in_eval_mode_is_an_error_in_an_own_loop(make_model):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = AdaccSession(model, optimizer, **COVERED)
    step(session, model, optimizer, batch_of(32))
    model.eval()
    with pytest.raises(UncoveredBlockError, match=r"\(it is in eval mode\).*call model\.train\(\)"):
        step(session, model, optimizer, batch_of(32))
    assert session.is_closed


@pytest.mark.parametrize("steps_inside", [True, False])
def test_a_skipped_batch_is_no_error_but_an_update_without_a_forward_is_one(make_model, steps_inside):
    model, other = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = AdaccSession(model, optimizer, **COVERED)
    for number in range(4):
        with session.step(batch_of(32)):
            if number == 1:  # as a batch whose loss would be undefined
                continue
            model(**batch_of(32)).loss.backward()
            if steps_inside:
                optimizer.step()
        if not steps_inside:
            optimizer.step()
    assert session.num_steps == 3
    with pytest.raises(UncoveredBlockError, match="of the very model that the session was given"):  # noqa: PT012
        with session.step(batch_of(32)):
            other(**batch_of(32)).loss.backward()
            if steps_inside:
                optimizer.step()
        optimizer.step()
        step(session, model, optimizer, batch_of(32))
    assert session.is_closed


def test_fallbacks_are_allowed_by_default():
    fallbacks = {"new data": ["h.0"]}
    refuse_fallbacks(AdaccConfig(), fallbacks)
    with pytest.raises(UncoveredBlockError, match=r"1 block \(h\.0\) would train without one: new data\. To cover"):
        refuse_fallbacks(AdaccConfig(on_uncovered="error"), fallbacks)
