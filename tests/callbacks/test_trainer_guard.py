"""TrainerGuard: found on the call stack, shared by callbacks, removed with the last of them."""

import pytest
from transformers import TrainerCallback

from adacc_hf import AdaccCallback
from adacc_hf.callbacks.trainer_guard import TrainerGuard


class Guarded(TrainerCallback):
    """Callback that records the guard's arguments."""

    def __init__(self):
        self.guard = self.checkpoint = None
        self.failures = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.guard = TrainerGuard.around_caller(self, self.fail)
        self.checkpoint = self.guard.checkpoint

    def on_train_end(self, args, state, control, **kwargs):
        self.guard.leave(self)

    def fail(self):
        self.failures += 1
        self.guard.leave(self)


class Ends(TrainerCallback):
    """Callback that records its events."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def test_callbacks_share_a_guard_and_no_event_is_lost(make_trainer):
    first, second, ends = Guarded(), Guarded(), [Ends(), Ends(), Ends()]
    trainer = make_trainer([ends[0], first, ends[1], second, ends[2]])
    callbacks_before = list(trainer.callback_handler.callbacks)
    trainer.train()
    assert trainer.callback_handler.callbacks == callbacks_before
    assert [end_callback.events for end_callback in ends] == [["begin", "end"]] * 3
    assert first.guard is second.guard
    assert (first.failures, second.failures) == (0, 0)
    assert not {"_adacc_guard", "_run_epoch"} & vars(trainer).keys()


def test_callbacks_added_and_removed_during_the_run_stay_so(make_trainer):
    added, removed, guarded = Ends(), Ends(), Guarded()

    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.remove_callback(removed)
                trainer.pop_callback(guarded)
                trainer.add_callback(added)
                assert guarded.failures == 1

    trainer = make_trainer([removed, guarded, Change()])
    trainer.train()
    assert trainer.callback_handler.callbacks[-1] is added
    assert removed not in trainer.callback_handler.callbacks
    assert (added.events, removed.events) == (["end"], ["begin"])


@pytest.mark.parametrize("resume", ["checkpoint-3", True, None])
def test_the_folder_that_a_run_resumes_from_is_known(train, tmp_path, resume):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    train(**settings)
    folder = str(tmp_path / "run" / "checkpoint-3")
    guarded = Guarded()
    train([guarded], resume=folder if resume == "checkpoint-3" else resume, **{**settings, "max_steps": 4})
    assert guarded.checkpoint == (folder if resume else None)


@pytest.mark.parametrize("name", ["compute_loss", "training_step"])
@pytest.mark.parametrize(("wraps", "step"), [(True, 3), (False, 3), (True, 0)])
def test_a_method_that_the_user_replaces_during_the_run_stays(make_trainer, lossless, name, wraps, step):
    class Replace(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step and not replacements:
                before = getattr(trainer, name) if wraps else getattr(type(trainer), name).__get__(trainer)
                replacements.append(lambda *args, **kwargs: 0.5 * before(*args, **kwargs))
                setattr(trainer, name, replacements[0])

    losses = []
    for callbacks in ([], [AdaccCallback(**lossless)]):
        replacements = []
        trainer = make_trainer([*callbacks, Replace()])
        for _ in range(2):
            trainer.train()
        assert getattr(trainer, name) is replacements[0]
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]
