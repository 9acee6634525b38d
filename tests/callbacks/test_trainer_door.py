"""Every private or undocumented name of the Trainer's that callbacks/trainer.py relies on is there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import accelerate
import transformers
from transformers import Trainer, TrainerCallback

from adacc_hf.callbacks import trainer as door

RELEASES = f"Transformers {transformers.__version__} and Accelerate {accelerate.__version__}"
HOLDERS = {
    "trainer": "Trainer",
    "caller": "Trainer",
    "self.trainer": "Trainer",
    "self._trainer": "Trainer",
    "self._handler": "Trainer.callback_handler",
    "accelerator": "Trainer.accelerator",
    "state": "Trainer.state",
}
"""What is in a variable or an attribute of this name in the file."""


class Looks(TrainerCallback):
    """Notes the variables of the innermost of the Trainer's frames that call it."""

    def on_train_begin(self, args, state, control, **kwargs):
        frame = sys._getframe(1)
        while not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        self.variables = frozenset(frame.f_locals)


def names_relied_on() -> list[str]:
    """The names by their tables, and all that the file reads of what it knows to be the Trainer's."""
    names = {f"Trainer.{name}" for name in (*door.GUARDED_METHODS, door.LAST_LOGGED)}
    for node in ast.walk(ast.parse(Path(door.__file__).read_text(encoding="utf-8"))):
        read = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        holder = next((name for name in HOLDERS if read.startswith(f"{name}.")), None)
        if holder is not None and read.replace(".", "_").isidentifier():
            names.add(HOLDERS[holder] + read.removeprefix(holder))
    return sorted(names)


def missing_names(trainer: Trainer) -> list[str]:
    missing = []
    for name in names_relied_on():
        found = trainer
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                missing.append(name)
                break
            found = getattr(found, part)
    return missing


def test_the_trainer_has_every_name(make_trainer):
    looks = Looks()
    trainer = make_trainer([looks])
    trainer.train()
    assert missing_names(trainer) == [], f"gone from {RELEASES}"
    assert door.RESUMED_FROM in looks.variables, f"gone from the Trainer's loop in {RELEASES}"


def test_one_that_is_gone_is_named(make_trainer):
    """A Trainer that has not trained yet has no step that it logged."""
    assert missing_names(make_trainer([])) == [f"Trainer.{door.LAST_LOGGED}"]
