"""The script for the first minutes on a GPU: packages from wheels, and the commands in each mode."""

import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from adacc_hf import cli
from adacc_hf.eval.records.ledger import RecordError
from adacc_hf.eval.repository import first_gpu
from adacc_hf.eval.repository.points import restore, save_points


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with wheels of a missing and of an installed package."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "given")
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("not_there_at_all", "torch"):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "FOUND = 1")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return folder


def test_only_what_is_missing_comes_from_the_wheels(wheels: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert first_gpu.add_wheels(wheels, site) == ["not_there_at_all-1.0-py3-none-any.whl"]
    assert sorted(path.name for path in site.iterdir()) == ["not_there_at_all", "not_there_at_all-1.0.dist-info"]
    import not_there_at_all

    assert not_there_at_all.FOUND == 1
    assert os.environ["PYTHONPATH"] == f"given{os.pathsep}{site}"
    # A second call finds the unpacked package by the path that a child process would get.
    assert first_gpu.is_installed("not-there-at-all")


def test_a_slice_is_a_part_of_eval_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(cli, "main", lambda command: commands.append(command) or 3)
    (tmp_path / "before/loss").mkdir(parents=True)
    (tmp_path / "before/loss/loss.json").write_text("{}")
    save_points(tmp_path / "before", tmp_path / "out")
    argv = ["--out", str(tmp_path / "out"), "--wheels", str(tmp_path), "--work", str(tmp_path / "work")]
    assert first_gpu.main([*argv, "--from", str(tmp_path / "out/records.tar.gz")]) == 3
    (full_run,) = commands
    assert full_run[:4] == ["eval", "all", "--device=cuda", "--resume"]
    assert (tmp_path / "work/records/loss/loss.json").read_text() == "{}"


def test_an_archive_is_one_of_records(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_text("no archive")
    with pytest.raises(RecordError, match=r"pass the records\.tar\.gz"):
        restore(tmp_path / "x.tar.gz", tmp_path / "work")
    with tarfile.open(tmp_path / "out.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "x.tar.gz", "../outside")
    with pytest.raises(RecordError, match=r"pass the records\.tar\.gz"):
        restore(tmp_path / "out.tar.gz", tmp_path / "work")
