"""Models trained by the recipe, each in a process of its own: eval measures what recipes make, and imports none."""

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
    """The recipe ended with another exit status than 0; it has said why."""


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One call of recipes/gpt2_pile.py."""

    method: str
    folder: Path
    """Its run folder. A checkpoint in it is gone on with, so nothing but this very run may write there."""
    options: Sequence[str]
    """All other options, as on its command line."""
    threads: int = 1
    """CPU threads of torch."""

    def train(self) -> dict[str, Any]:
        """What training reached, by its last record. Raises TrainingFailedError."""
        checkpoint = last_checkpoint(self.folder)
        command = [sys.executable, str(recipe_path()), "--method", self.method, "--output_dir", str(self.folder)]
        command += ["--report", "false", *self.options]
        command += ["--resume_from_checkpoint", str(checkpoint)] if checkpoint else []
        with _held(self.folder) as lock:
            # The training process holds the lock too, so that one whose parent was killed is not joined by a second.
            environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
            status = subprocess.run(command, env=environment, pass_fds=[lock], check=False).returncode
        if status != 0:
            raise TrainingFailedError(f"{' '.join(command)} ended with status {status}; its last lines say why")
        return self._figures(checkpoint)

    def _figures(self, checkpoint: Path | None) -> dict[str, Any]:
        metrics = read_json(self.folder / "all_results.json", RecordError, "training result")
        policy = self.folder / POLICY_FILE
        return {
            "steps": metrics["steps"],
            "final_train_loss": metrics["final_train_loss"],
            "validation_loss": metrics["eval_loss"],
            "gone_on_from": checkpoint.name if checkpoint else None,
            # What the policy did at the end of training; a method without one keeps or recomputes everything.
            "actions": dict(Policy.load(policy).action_counts()) if policy.is_file() else None,
        }


def recipe_path() -> Path:
    """The recipe in the source checkout that this package is imported from. Raises ValueError outside of one."""
    path = Path(adacc_hf.__file__).resolve().parents[1] / "recipes" / "gpt2_pile.py"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: models are trained by the recipes, which an installed package leaves out; "
            "run from a source checkout (pip install -e .)"
        )
    return path


def last_checkpoint(folder: Path) -> Path | None:
    """The latest whole checkpoint of a run folder; its trainer_state.json is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """The descriptor of a lock on the folder. Raises RecordError where a training process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        raise RecordError(
            f"{folder} is still being trained into by an earlier run: wait for its end, or end that process"
        ) from None
    finally:
        os.close(descriptor)
