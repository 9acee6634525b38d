"""The Trainer's logs: recognition of training logs, and the log that receives the metrics."""

from types import SimpleNamespace

from adacc_hf.callbacks.training_log import OwnLogs, add_to_log, is_training_log


def test_logs_of_training_are_told_from_those_of_evaluation():
    assert is_training_log({"loss": 1.0, "grad_norm": 2.0})
    assert is_training_log({"train_runtime": 1.0, "train_loss": 2.0})
    assert not is_training_log({"eval_loss": 1.0})
    assert not is_training_log({})
    assert not is_training_log(None)


def test_metrics_go_into_the_log_and_into_the_last_entry_of_the_history():
    logs, state = {"loss": 1.0}, SimpleNamespace(log_history=[{"loss": 2.0}, {"loss": 1.0, "step": 3}])
    add_to_log(logs, state, {"a/b": 5.0})
    assert logs == {"loss": 1.0, "a/b": 5.0}
    assert state.log_history == [{"loss": 2.0}, {"loss": 1.0, "step": 3, "a/b": 5.0}]


def test_the_trainers_own_logs_are_those_before_which_it_notes_the_step():
    trainer = SimpleNamespace(_globalstep_last_logged=0)
    own = OwnLogs(trainer)
    has_other_logs = []
    for step in (0, 1, 1, 3, 3):
        trainer._globalstep_last_logged = step
        has_other_logs.append(own.has_another())
    assert has_other_logs == [False, True, False, True, False]
    assert OwnLogs(None).has_another()
