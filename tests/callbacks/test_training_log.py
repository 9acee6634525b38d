"""The Trainer's logs: recognition of training logs, and the log that receives the metrics."""

from types import SimpleNamespace

from adacc_hf.callbacks.training_log import OwnLogs


def test_the_trainers_own_logs_are_those_before_which_it_notes_the_step():
    trainer = SimpleNamespace(_globalstep_last_logged=0)
    own = OwnLogs(trainer)
    has_other_logs = []
    for step in (0, 1, 1, 3, 3):
        trainer._globalstep_last_logged = step
        has_other_logs.append(own.has_another())
    assert has_other_logs == [False, True, False, True, False]
    assert OwnLogs(None).has_another()
