"""Policies with less memory after a step ran out of memory, and with more static memory."""

from __future__ import annotations

import pytest
from run_builders import InOrder, Lengths, events, failing, run_lengths
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.solve.solver import least_policy


@pytest.mark.parametrize("failure_place", ["forward", "backward"])
@pytest.mark.parametrize("budget", [0.7, "peak"], ids=["of-stored", "of-peak"])
def test_out_of_memory_leads_to_a_tighter_policy_and_the_same_training(
    train, make_model, failure_place, budget, lossless
):
    assert make_model().config.resid_pdrop > 0, "the second try must draw the masks of the first"
    plain = train(max_steps=6)
    if budget == "peak":
        probe = AdaccCallback(**{**lossless, "memory_budget": 0.7})
        train([probe], max_steps=3)
        budget = probe.policy.predicted_peak_bytes
    callback = AdaccCallback(**{**lossless, "memory_budget": budget})
    run = train([callback], trainer_class=failing((4, failure_place)), max_steps=6)
    run.assert_equals(plain)
    (event,) = [event for event in events(callback, "memory") if "out of memory" in event.get("reason", "")]
    assert event["step"] == 4
    in_force = [e for e in callback.history if e["event"] in ("policy", "change") and e["step"] < 4][-1]
    assert event["stored_bytes"] < in_force["stored_bytes"]


def test_a_tighter_budget_holds_for_the_same_sizes_after_a_resume(make_trainer, lossless, tmp_path):
    lengths = [16] * 4 + [32] * 18 + [16, 16, 16]
    recorded_budgets = []

    class NoteBudgets(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == state.max_steps:
                phase = callback.session.phase
                peaks = [record.policy.predicted_stored_bytes for record in phase.choice.records.values()]
                budget = callback.session.state.corrections.memory_budget
                recorded_budgets.append((budget, len(peaks)))

    class Failing(failing((23, "forward")), InOrder):
        """Trainer that runs out of memory at 16 tokens."""

    callback = AdaccCallback(**lossless)
    saving = {"save_strategy": "steps", "save_steps": 24}
    run_lengths(make_trainer, lengths, [callback, NoteBudgets()], trainer_class=Failing, **saving)
    trainer = make_trainer([callback, NoteBudgets()], trainer_class=InOrder, max_steps=len(lengths))
    trainer.train_dataset = Lengths(lengths)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-24"))
    (tightened, _), (resumed, _) = recorded_budgets
    assert tightened < lossless["memory_budget"]
    assert resumed == tightened


def test_a_tighter_budget_holds_for_other_sizes_too(make_trainer, lossless):
    """Memory runs out at 32 tokens. The policy for 16 tokens exceeds the new budget too."""
    callback = AdaccCallback(**lossless)

    class Failing(failing((10, "forward")), InOrder):
        """Trainer that runs out of memory once."""

    run_lengths(make_trainer, [16] * 5 + [32] * 5 + [16, 16, 32, 32], [callback], trainer_class=Failing)
    (event,) = [event for event in events(callback, "memory") if "out of memory" in event.get("reason", "")]
    (later,) = [event for event in events(callback, "change") if event["step"] > 10]
    assert (event["step"], later["step"]) == (10, 11)
    assert later["reason"] == "memory ran out"
    earlier = [event for event in callback.history if event["event"] in ("policy", "change") and event["step"] < 6]
    assert later["stored_bytes"] < earlier[-1]["stored_bytes"]


def test_sizes_that_no_policy_fits_after_memory_ran_out_take_the_least_memory(make_trainer, lossless):
    settings = {**lossless, "memory_budget": 0.7}
    probe = AdaccCallback(**settings)
    run_lengths(make_trainer, [32] * 3, [probe])
    least = least_policy(probe.profile, probe.config).predicted_peak_bytes
    callback = AdaccCallback(**settings | {"memory_budget": int(1.3 * least)})

    class Tighten(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                callback.session.state.corrections.tighten(least // 2)

    run_lengths(make_trainer, [32] * 5 + [16, 32, 32], [callback, Tighten()])
    (later,) = [event for event in events(callback, "change") if event["step"] > 6]
    assert later["step"] == 7
    assert least // 2 < later["peak_bytes"] < int(1.1 * least)


def test_the_optimizers_state_is_planned_from_its_first_step_on(make_trainer, lossless):
    static_bytes, outcomes = [], []

    class AddState(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            phase = callback.session.phase
            record = phase.choice.shown
            static_bytes.append(record.profile.static_bytes)
            if state.global_step == 3:
                for extra in (callback.config.memory_budget - record.policy.predicted_peak_bytes, 1 << 20):
                    plans = record.policy.plans
                    phase.add_static(extra, "a test")
                    outcomes.append(record.policy.plans != plans)
                assert record.policy.predicted_peak_bytes <= callback.config.memory_budget
                phase.add_static(callback.config.memory_budget, "a test")
                reasons = [event.get("reason", "") for event in callback.history[-2:]]
                assert any("no policy fits the budget any more" in reason for reason in reasons)

    settings = {"max_steps": 3, "per_device_train_batch_size": 32}
    callback = AdaccCallback(**lossless | {"memory_budget": 16 << 20})
    trainer = make_trainer([callback, AddState()], **settings)
    trainer.train()
    state = sum(2 * parameter.nbytes + 4 for parameter in trainer.model.parameters())
    assert static_bytes[0] == static_bytes[1] == static_bytes[2]  # this callback's turn comes after that of Adacc
    without_state = [callback, AddState()]
    make_trainer(without_state, **settings | {"optim": "sgd"}).train()
    assert static_bytes[0] - static_bytes[3] == state
    assert outcomes == [False, True] * 2


@pytest.mark.parametrize("counts", [(1, 4), (1, 2), (2, 3), (1, 2, 4), (4, 1)], ids=str)
def test_a_larger_accumulation_counts_from_its_first_step_on(make_trainer, lossless, counts):
    """A callback of the user changes `gradient_accumulation_steps` in mid-run, to one of `counts` per epoch."""
    static_bytes, batch_bytes = [], []

    class Grow(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            args.gradient_accumulation_steps = counts[round(state.epoch or 0)]

        def on_step_end(self, args, state, control, **kwargs):
            if own:
                choice = own[0].session.phase.choice
                record = choice.shown
                static_bytes.append(record.profile.static_bytes)
                batch_bytes.append(choice.nbytes)
                assert record.policy.predicted_peak_bytes <= own[0].config.memory_budget

    settings = {"per_device_train_batch_size": 8, "optim": "sgd", "gradient_accumulation_steps": counts[0]}
    runs, settings = [], settings | {"max_steps": -1, "num_train_epochs": len(counts)}
    for own in ([], [AdaccCallback(**lossless | {"memory_budget": 6 << 20})]):
        trainer = make_trainer([*own, Grow()], **settings)
        trainer.train()
        runs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert runs[0] == runs[1]
    gradients = sum(parameter.nbytes for parameter in trainer.model.parameters())
    more = max(counts) - counts[0]
    assert static_bytes[-1] - static_bytes[0] == gradients * (counts[0] == 1) + more * batch_bytes[-1]
    assert batch_bytes[-1] > 0
