"""Trainings in separate processes: their working folders, and the lock against a second start."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from adacc_hf.eval.records.ledger import RecordError
from adacc_hf.eval.repository import recipe_runs
from adacc_hf.eval.repository.recipe_runs import RecipeRun, TrainingFailedError, last_checkpoint, recipe_path


def test_the_latest_whole_checkpoint_is_gone_on_with(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_failed_training_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "recipe.py"
    script.write_text("import os, sys; sys.exit(int(os.environ['OMP_NUM_THREADS']))")
    monkeypatch.setattr(recipe_runs, "recipe_path", lambda: script)
    run = RecipeRun(method="none", folder=tmp_path / "run", options=["--seed", "1"], threads=3)
    with pytest.raises(TrainingFailedError, match=r"recipe\.py --method none .* --seed 1 ended with status 3"):
        run.train()


@pytest.mark.usefixtures("checkout")
def test_a_folder_that_is_trained_into_is_left_alone(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(RecordError, match="is locked by the training of an earlier run"):
            RecipeRun(method="none", folder=tmp_path, options=[]).train()
    finally:
        os.close(descriptor)


def test_a_training_holds_its_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training process holds the lock, too. If only its parent is killed, the folder stays locked."""
    script = tmp_path / "recipe.py"
    script.write_text(
        "import fcntl, os, sys\n"
        "folder = os.open(sys.argv[sys.argv.index('--output_dir') + 1], os.O_RDONLY)\n"
        "inherited = [int(name) for name in os.listdir('/proc/self/fd') if int(name) not in (0, 1, 2, folder)]\n"
        "paths = [os.readlink(f'/proc/self/fd/{one}') for one in inherited if os.path.exists(f'/proc/self/fd/{one}')]\n"
        "sys.exit(7 if os.path.realpath(f'/proc/self/fd/{folder}') in paths else 8)\n"
    )
    monkeypatch.setattr(recipe_runs, "recipe_path", lambda: script)
    with pytest.raises(TrainingFailedError, match="ended with status 7"):
        RecipeRun(method="none", folder=tmp_path / "run", options=[]).train()


@pytest.mark.usefixtures("checkout")
def test_the_recipe_is_found_in_the_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe_path().name == "gpt2_pile.py"
    monkeypatch.setattr(recipe_runs.adacc_hf, "__file__", str(tmp_path / "adacc_hf" / "__init__.py"))
    with pytest.raises(ValueError, match="run from a source checkout"):
        recipe_path()
