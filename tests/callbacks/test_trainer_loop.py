"""Facts about a Trainer: figures that a profile leaves as they are, and undocumented names that releases must have."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from adacc_hf import AdaccCallback, Policy
from adacc_hf.artifacts.files import POLICY_FILE
from adacc_hf.callbacks import trainer_guard, trainer_loop, trainer_mixin

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
"""Owner of the variables and attributes with each name in the source files."""


class RecordVariables(TrainerCallback):
    """Callback that records the local variables of the Trainer's innermost frame that calls the callback."""

    def on_train_begin(self, args, state, control, **kwargs):
        frame = sys._getframe(1)
        while not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        self.variables = frozenset(frame.f_locals)


def names_relied_on() -> list[str]:
    """Return the names in the files' constants, and all attributes that the files read from a Trainer."""
    names = {f"Trainer.{name}" for name in trainer_guard.GUARDED_METHODS}
    for module in (trainer_guard, trainer_loop, trainer_mixin):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            expression = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            holder = next((name for name in HOLDERS if expression.startswith(f"{name}.")), None)
            if holder is not None and expression.replace(".", "_").isidentifier():
                names.add(HOLDERS[holder] + expression.removeprefix(holder))
    return sorted(names)


def missing_names(trainer: Trainer) -> list[str]:
    missing = []
    for name in names_relied_on():
        owner = trainer
        for part in name.split(".")[1:]:
            if not hasattr(owner, part):
                missing.append(name)
                break
            owner = getattr(owner, part)
    return missing


def test_the_trainer_has_every_name(make_trainer):
    recorder = RecordVariables()
    trainer = make_trainer([recorder])
    trainer.train()
    assert missing_names(trainer) == [], f"gone from {RELEASES}"
    assert trainer_guard.RESUMED_FROM in recorder.variables, f"gone from the Trainer's loop in {RELEASES}"


def test_one_that_is_gone_is_named(make_trainer, monkeypatch):
    monkeypatch.setattr(trainer_guard, "GUARDED_METHODS", ("_run_epoch", "_run_epochs"))
    assert missing_names(make_trainer([])) == ["Trainer._run_epochs"]


def test_the_trials_of_a_search_have_folders_of_their_own(make_trainer, lossless, tmp_path, monkeypatch):
    """The Trainer's own search needs a package. It calls `train` like this for each trial."""
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: {})
    callback = AdaccCallback(**lossless)
    trainer = make_trainer([callback], max_steps=2, save_strategy="steps", save_steps=2)
    trainer.hp_search_backend, trainer.hp_name, trainer.hp_space = HPSearchBackend.OPTUNA, None, lambda trial: {}
    policies = []
    for number in range(2):
        trainer.train(trial=SimpleNamespace(number=number, params={}))
        policies.append(callback.policy)
    trainer.hp_search_backend = None
    trainer.train()
    names = ("run-0/checkpoint-2", "run-0", "run-1/checkpoint-2", "run-1", "checkpoint-2", ".")
    for name, policy in zip(names, [*policies[:1] * 2, *policies[1:] * 2, *[callback.policy] * 2], strict=True):
        assert Policy.load(tmp_path / "run" / name / POLICY_FILE) == policy
