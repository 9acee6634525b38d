"""Counts of steps that followed the policy or fell back, in the log and the report, and texts on a run's policy."""

from __future__ import annotations

import json
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from run_builders import InOrder, refuse_profiles_of
from transformers import T5Config, T5ForConditionalGeneration, TrainerCallback

import adacc_hf.adapt.policy_phases as phases_module
from adacc_hf import AdaccCallback, solve_policy
from adacc_hf.adapt.history import describe_costs
from adacc_hf.adapt.policy_phases import OTHER_OPERATORS
from adacc_hf.artifacts.files import HISTORY_FILE
from adacc_hf.artifacts.units import format_bytes
from adacc_hf.cli import main
from adacc_hf.solve.simple_policies import checkpoint_policy, uniform_policy

BEFORE = "full recomputation, before there was a policy"
NO_POLICY = "full recomputation, because there is no policy for batches of this size"
OTHER_OPERATORS_RAN = "other operators than when profiled, with the least memory"
LOSSLESS = {"actions": ("retain", "recompute")}


class Rows(torch.utils.data.Dataset):
    """Batches of 4 rows, one length per batch. In a padded batch each row ends with a few masked tokens."""

    def __init__(self, batches, padded=()):
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for number, length in enumerate(batches):
            for place in range(4):
                ids = torch.randint(1, 97, (length,), generator=generator)
                mask = torch.ones(length, dtype=torch.long)
                if number in padded:
                    mask[length - 2 - place :] = 0
                labels = ids.masked_fill(mask == 0, -100)
                row = {"input_ids": ids, "labels": labels}
                self.rows.append(row | ({"attention_mask": mask} if padded else {}))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class ForwardCalls(TrainerCallback):
    """Callback that counts the forwards of GPT-2's blocks in each step by their first module, which torch's checkpoint
    runs twice.

    The hooks stand on that module, because hooks of a block surround its checkpoint. The counts go into a queue,
    because the checkpoint restores containers and objects that its second forward changes. Dynamo does not look into
    the counting.
    """

    def __init__(self, model):
        self.steps, calls = [], SimpleQueue()
        self._calls, self._note = calls, torch.compiler.assume_constant_result(lambda: calls.put(None))
        for block in model.transformer.h:
            block.ln_1.register_forward_pre_hook(self._count)

    def _count(self, *_):
        self._note()

    def on_step_begin(self, *args, **kwargs):
        while not self._calls.empty():
            self._calls.get()

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.steps.append(self._calls.qsize())


def run(make_trainer, rows, callbacks, model=None, **settings):
    trainer = make_trainer(callbacks, model=model, trainer_class=InOrder, **{"max_steps": len(rows) // 4, **settings})
    trainer.train_dataset = rows
    trainer.train(resume_from_checkpoint=settings.get("resume_from_checkpoint"))
    return trainer


def logged(trainer, key):
    return [log[key] for log in trainer.state.log_history if "loss" in log and key in log]


def fallbacks(callback):
    return {e["reason"]: e["fallback_steps"] for e in callback.history if e["event"] == "fallback"}


def test_steps_that_ran_the_forward_again_are_those_that_the_log_counts(
    make_trainer, make_model, monkeypatch, late_policy
):
    refuse_profiles_of(32, monkeypatch)
    model = make_model()
    calls = ForwardCalls(model)
    callback = AdaccCallback(**LOSSLESS, memory_budget=0.6)
    trainer = run(make_trainer, Rows([16, 16, 16, 32, 16, 32, 32, 16]), [callback, calls], model=model)
    num_blocks = len(model.transformer.h)
    # The counter stops Dynamo, so one block of the recorded second step runs once more, for its memory.
    assert calls.steps == [2 * num_blocks, num_blocks + 1, *(num_blocks * times for times in (1, 2, 1, 2, 2, 1))]
    twice = [1, *(1 + sum(n >= 2 * num_blocks for n in calls.steps[: k + 1]) for k in range(1, len(calls.steps)))]
    assert logged(trainer, "adacc/fallback_steps") == twice[1:], "there is no policy to log in step 1"
    assert fallbacks(callback) == {NO_POLICY: 3}
    (policy,) = [event for event in callback.history if event["event"] == "policy"]
    assert policy["fallback_steps"] == 2


@pytest.fixture
def padding_comes_and_goes(make_trainer, make_model):
    """Return a function that trains 7 steps. The 5th and the 7th have no padding, and run other operators."""

    def train(memory_budget=0.6, **settings):
        callback = AdaccCallback(**LOSSLESS, memory_budget=memory_budget)
        rows = Rows([32] * 7, padded=(0, 1, 2, 3, 5))
        return callback, run(make_trainer, rows, [callback], model=make_model(), **settings)

    return train


def test_steps_on_another_path_are_counted_and_told_in_the_report(
    late_policy, padding_comes_and_goes, tmp_path, capsys
):
    pytest.importorskip("matplotlib")
    callback, trainer = padding_comes_and_goes()
    assert logged(trainer, "adacc/fallback_steps") == [2, 2, 2, 3, 3, 4]
    ((why, number),) = fallbacks(callback).items()
    assert why.startswith("other operators than when profiled")
    assert number == 2
    folder = tmp_path / "run"
    assert json.loads((folder / HISTORY_FILE).read_text()) == callback.history
    assert main(["explain", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "4 steps did not follow the policy, or not in all calls:" in output
    assert f"2: {BEFORE}" in output
    assert f"2: {why}" in output
    assert main(["report", str(folder)]) == 0
    report = (folder / "report.md").read_text()
    assert f"2: {BEFORE}" in report
    assert f"2: {why}" in report


def test_a_batch_on_another_path_may_exceed_a_budget_in_bytes(padding_comes_and_goes, caplog):
    probe, _ = padding_comes_and_goes(max_steps=3)
    padding_comes_and_goes(memory_budget=probe.policy.predicted_peak_bytes)
    assert caplog.text.count("ran other operators than the profiled ones, and may take more than memory_budget") == 1


def test_a_run_that_resumes_goes_on_counting(late_policy, padding_comes_and_goes, tmp_path):
    padding_comes_and_goes(save_strategy="steps", save_steps=5, max_steps=5)
    callback, trainer = padding_comes_and_goes(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert logged(trainer, "adacc/fallback_steps")[-2:] == [3, 5], "two steps of the resumed run have none"
    assert list(fallbacks(callback).values()) == [1]


def tiny_t5():
    torch.manual_seed(1)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=97, **sizes, decoder_start_token_id=0, use_cache=False))


@pytest.mark.parametrize("num_padded", [2, 8])
def test_most_batches_run_operators_that_were_not_profiled(make_trainer, monkeypatch, num_padded):
    """Once most batches have padding, unlike the profiled one, one of them is profiled and its policy used."""
    monkeypatch.setattr(phases_module, "LOOK_STEPS", 4)
    padded = range(3, 3 + num_padded)
    trained = []
    for callbacks in ([], [AdaccCallback(**LOSSLESS, memory_budget=0.4)]):
        torch.manual_seed(0)
        trainer = run(make_trainer, Rows([32] * 12, padded=padded), callbacks, model=tiny_t5())
        trained.append(trainer.model.state_dict())
    plain, tensors_of_run = trained
    assert all(torch.equal(tensors_of_run[name], tensor) for name, tensor in plain.items())
    (callback,) = callbacks
    policies = [(e["step"], e.get("reason")) for e in callback.history if e["event"] == "policy"]
    other_operators = {why: steps for why, steps in fallbacks(callback).items() if why.startswith("other operators")}
    if num_padded == 2:
        assert [step for step, _ in policies] == [1]
        assert other_operators == {OTHER_OPERATORS_RAN: 2}
        return
    # The check 8 steps after the first policy finds that steps 6 to 9 have padding. The next batch is profiled.
    assert policies[1:] == [(10, OTHER_OPERATORS)]
    # Steps 4 to 9 have padding, and step 12 has none.
    assert other_operators == {OTHER_OPERATORS_RAN: 7}


def test_costs_are_relative_to_plain_training(gpt2_like_profile: Any) -> None:
    profile = gpt2_like_profile(num_blocks=4)
    policy = solve_policy(profile, 0.5)
    text = describe_costs(policy, profile)
    plain = format_bytes(profile.plain_stored_bytes)
    assert f"stores {format_bytes(policy.predicted_stored_bytes)}, 50% of plain training's {plain}" in text
    full = uniform_policy(profile, "recompute").predicted_overhead_ms
    assert f"(about {policy.predicted_overhead_ms / (3 * full):+.0%} of the blocks' time)" in text
    slow = replace(profile, step_ms=1000 * profile.step_ms)
    assert describe_costs(policy, slow) == text, "the measured step also records its memory"
    assert describe_costs(policy, None) == policy.summary()
    untrusted = replace(profile, kinds=tuple(replace(kind, untrusted="it draws numbers") for kind in profile.kinds))
    checkpointed = describe_costs(checkpoint_policy(profile), untrusted)
    assert checkpointed.endswith("Blocks that cannot be replayed: it draws numbers")
