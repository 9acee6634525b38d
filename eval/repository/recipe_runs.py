"""Trainings by the recipe, each in its own process.

Therefore eval can measure models of recipes without importing recipes.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adacc_hf
from adacc_hf.artifacts.errors import AdaccError
from adacc_hf.artifacts.files import POLICY_FILE, read_json
from adacc_hf.artifacts.policy import Policy
from adacc_hf.eval.records.ledger import RecordError


class TrainingFailedError(AdaccError):
    """Error of a recipe that ended with an exit status other than 0. The recipe's output has the reason."""


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One call of recipes/gpt2_pile.py."""

    method: str
    folder: Path
    """Run folder. The run resumes from a checkpoint in the folder, so only the same run may write there."""
    options: Sequence[str]
    """All other command-line options."""
    threads: int = 1
    """CPU threads of torch."""

    def train(self) -> dict[str, Any]:
        """Train, and return the figures of the last record. Raise TrainingFailedError if the training fails."""
        checkpoint = last_checkpoint(self.folder)
        command = [sys.executable, str(recipe_path()), "--method", self.method, "--output_dir", str(self.folder)]
        command += ["--report", "false", *self.options]
        command += ["--resume_from_checkpoint", str(checkpoint)] if checkpoint else []
        with _lock_run_folder(self.folder) as lock:
            # The training process inherits the lock. If its parent is killed, no second training can start in the
            # folder.
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
            status = subprocess.run(command, env=environment, pass_fds=[lock], check=False).returncode
        if status != 0:
            raise TrainingFailedError(
                f"{' '.join(command)} ended with status {status}: see the last lines of its output"
            )
        return self._figures(checkpoint)

    def _figures(self, checkpoint: Path | None) -> dict[str, Any]:
        metrics = read_json(self.folder / "all_results.json", RecordError, "training result")
        policy = self.folder / POLICY_FILE
        return {
            "steps": metrics["steps"],
            "final_train_loss": metrics["final_train_loss"],
            "validation_loss": metrics["eval_loss"],
            "gone_on_from": checkpoint.name if checkpoint else None,
            # Actions of the policy at the end of training. A method without a policy saves or recomputes everything.
            "actions": dict(Policy.load(policy).action_counts()) if policy.is_file() else None,
        }


def recipe_path() -> Path:
    """Return the recipe in the source checkout that this package is imported from. Raise ValueError if there is
    none."""
    path = Path(adacc_hf.__file__).resolve().parents[1] / "recipes" / "gpt2_pile.py"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: models are trained by the recipes, which an installed package leaves out; "
            "run from a source checkout (pip install -e .)"
        )
    return path


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest complete checkpoint of a run folder.

    A complete checkpoint has trainer_state.json, written last.
    """
    complete_checkpoints = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(complete_checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


@contextmanager
def _lock_run_folder(folder: Path) -> Iterator[int]:
    """Lock the folder, and yield the descriptor of the lock. Raise RecordError if a training process has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        raise RecordError(
            f"{folder} is locked by the training of an earlier run: wait for its end, or end that process"
        ) from None
    finally:
        os.close(descriptor)
