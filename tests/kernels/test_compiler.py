"""Compilation of the package's C++ code: once per source, flags and facts, into the user's cache."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from adacc_hf.kernels import _compiler
from adacc_hf.kernels._compiler import build

FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the source of a small library. The cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "_seven.cpp"
    path.write_text('extern "C" int number() { return 7; }')
    return path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the compiler's command lines, without the questions for its version."""
    commands = []
    run = subprocess.run

    def record(command, *args, **kwargs):
        if "--version" not in command:
            commands.append(command)
        return run(command, *args, **kwargs)

    monkeypatch.setattr(_compiler.subprocess, "run", record)
    return commands


def test_a_library_is_built_once(source: Path, tmp_path: Path, compilations: list[list[str]]) -> None:
    library = build(source, FLAGS)
    assert library.parent == tmp_path / "cache" / "adacc_hf"
    assert library.name.startswith("seven-")
    assert ctypes.CDLL(str(library)).number() == 7
    assert build(source, FLAGS) == library
    assert len(compilations) == 1
    assert list(library.parent.iterdir()) == [library], "no scratch folder is left"


def test_all_that_a_library_depends_on_is_in_its_name(source: Path, compilations: list[list[str]]) -> None:
    libraries = {build(source, FLAGS), build(source, (*FLAGS, "-O2")), build(source, FLAGS, facts=["torch 2.13"])}
    source.write_text('extern "C" int number() { return 8; }')
    libraries.add(build(source, FLAGS))
    assert len(libraries) == len(compilations) == 4
    assert {ctypes.CDLL(str(library)).number() for library in libraries} == {7, 8}


def test_a_source_that_does_not_compile_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("no C++")
    with pytest.raises(subprocess.CalledProcessError):
        build(source, FLAGS)
    assert list((tmp_path / "cache" / "adacc_hf").iterdir()) == []


def test_a_machine_without_a_compiler_is_told_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(_compiler.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"neither g\+\+ nor clang\+\+ found: install one or set CXX"):
        build(source, FLAGS)
