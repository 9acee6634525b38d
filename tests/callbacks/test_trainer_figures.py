"""A Trainer's figures are unchanged after losses were computed in between."""

from collections import defaultdict, deque
from types import SimpleNamespace

from adacc_hf.callbacks.trainer_loop import keep_figures


def trainer_with_figures():
    train = defaultdict(list, {"reward": [1.0]})
    return SimpleNamespace(
        metrics={"train": train, "eval": {}}, num_tokens=7, texts=deque(["a"], maxlen=2), model=object()
    )


def test_what_was_gathered_in_between_is_gone():
    trainer = trainer_with_figures()
    train, texts = trainer.metrics["train"], trainer.texts
    with keep_figures(trainer):
        train["reward"].append(2.0)
        train["margin"].append(3.0)
        trainer.metrics["other"] = {}
        texts += ["b", "c"]
        trainer.num_tokens += 5
        trainer.window = 1
    expected = trainer_with_figures()
    expected.model = trainer.model
    assert trainer == expected
    assert trainer.metrics["train"] is train
    assert trainer.texts is texts


def test_what_was_taken_out_is_back():
    trainer = trainer_with_figures()
    with keep_figures(trainer):
        del trainer.metrics["train"]
        del trainer.num_tokens
    assert trainer.metrics["train"]["reward"] == [1.0]
    assert trainer.num_tokens == 7


def test_nothing_is_logged_in_between():
    logged = []
    trainer = SimpleNamespace(log=logged.append)
    with keep_figures(trainer):
        trainer.log({"loss": 1.0})
    trainer.log({"loss": 2.0})
    assert logged == [{"loss": 2.0}]


def test_without_a_trainer_there_is_nothing_to_keep():
    with keep_figures(None):
        pass
