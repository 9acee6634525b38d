"""TrainerGuard: found from the stack, shared by callbacks, gone with the last of them."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback

from adacc_hf.callbacks.trainer import TrainerGuard


class Guarded(TrainerCallback):
    """Notes what the guard gives it."""

    def __init__(self):
        self.guard = self.checkpoint = None
        self.failures = 0
        self.order = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.guard = TrainerGuard.around_caller(self, self.fail)
        self.checkpoint = self.guard.checkpoint

    def on_step_end(self, args, state, control, **kwargs):
        self.order = list(self.guard._handler.callbacks)

    def on_train_end(self, args, state, control, **kwargs):
        self.guard.leave(self)

    def fail(self):
        self.failures += 1
        self.guard.leave(self)


class FailingTrainEnd(TrainerCallback):
    def on_train_end(self, args, state, control, **kwargs):
        raise ZeroDivisionError


class Ends(TrainerCallback):
    """Counts its events: a list that is changed while the handler goes over it skips some."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def test_nothing_calls_nothing_is_guarded():
    assert TrainerGuard.around_caller(TrainerCallback(), lambda: None) is None


def test_guarded_callbacks_come_first_in_their_order_and_no_event_is_lost(make_trainer):
    one, two, ends = Guarded(), Guarded(), [Ends(), Ends(), Ends()]
    trainer = make_trainer([ends[0], one, ends[1], two, ends[2]])
    before = list(trainer.callback_handler.callbacks)
    trainer.train()
    assert one.order == [one, two, *(callback for callback in before if callback not in (one, two))]
    assert trainer.callback_handler.callbacks == before
    assert [each.events for each in ends] == [["begin", "end"]] * 3
    assert one.guard is two.guard
    assert (one.failures, two.failures) == (0, 0)
    assert not {"_adacc_guard", "_run_epoch"} & vars(trainer).keys()


def test_every_guarded_callback_hears_of_a_failure_once(make_trainer):
    one, two = Guarded(), Guarded()
    trainer = make_trainer([FailingTrainEnd(), one, two])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    # `one` and `two` are first in the list by then: they left the guard before the third callback failed.
    assert (one.failures, two.failures) == (0, 0)
    trainer.add_callback(type("Late", (TrainerCallback,), {"on_log": lambda *_, **__: 1 / 0}))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert (one.failures, two.failures) == (1, 1)


def test_callbacks_added_and_removed_during_the_run_stay_so(make_trainer):
    added, removed = Ends(), Ends()

    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.remove_callback(removed)
                trainer.add_callback(added)

    trainer = make_trainer([removed, Guarded(), Change()])
    trainer.train()
    assert trainer.callback_handler.callbacks[-1] is added
    assert removed not in trainer.callback_handler.callbacks
    assert (added.events, removed.events) == (["end"], ["begin"])


def test_patches_of_the_instance_are_put_back(make_trainer):
    trainer = make_trainer([Guarded()])
    calls = []
    original = trainer._run_epoch

    def patched(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    trainer._run_epoch = patched
    trainer.train()
    assert trainer._run_epoch is patched
    assert calls == [1]


@pytest.mark.parametrize("resume", ["checkpoint-3", True, None])
def test_the_folder_that_a_run_resumes_from_is_known(train, tmp_path, resume):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    train(**settings)
    folder = str(tmp_path / "run" / "checkpoint-3")
    guarded = Guarded()
    train([guarded], resume=folder if resume == "checkpoint-3" else resume, **{**settings, "max_steps": 4})
    assert guarded.checkpoint == (folder if resume else None)
