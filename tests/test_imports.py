"""What importing the package loads, what it may shadow, and which way its imports point."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import adacc_hf

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted((ROOT / "adacc_hf").rglob("*.py"))
# The solving side reads and writes records; it runs where no torch is installed.
TORCH_FREE = (
    "artifacts/units",
    "artifacts/files",
    "artifacts/errors",
    "artifacts/config",
    "artifacts/policy",
    "artifacts/profile",
    "artifacts/step_peak",
    "solve/solver",
)

# Stands for Hugging Face's own `kernels` package: any name can be imported from it, every decorator is the identity.
FAKE_KERNELS = """
class AnyMeta(type):
    def __getattr__(cls, name):
        return cls()

class Any(metaclass=AnyMeta):
    def __init__(self, *args, **kwargs): ...
    def __call__(self, target=None, *args, **kwargs): return target
    def __or__(self, other): return self

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Any
"""


def run_python(code: str, *, cwd: Path, **environment: str) -> str:
    """Standard output of `python -c code`, run in `cwd`, which is thereby the first entry of sys.path."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def imported_modules(path: Path) -> Iterator[str]:
    """Names that the file imports anywhere, inside functions too; not what only a type checker sees."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it from adacc_hf"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def python_files(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder}/ holds no Python files"
    return files


def imports_any(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offending(paths: list[Path], packages: tuple[str, ...]) -> list[str]:
    return [f"{path.name}: {name}" for path in paths for name in imported_modules(path) if imports_any(name, packages)]


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "triton", "highspy", "lm_eval", "matplotlib", "numpy", "pulp"}
    code = f"import adacc_hf, sys; print(sorted({heavy!r} & set(sys.modules)))"
    assert run_python(code, cwd=tmp_path) == "[]"


def test_every_public_name_resolves_without_a_device(tmp_path: Path) -> None:
    code = (
        "import adacc_hf, sys, torch\n"
        "for name in adacc_hf.__all__: getattr(adacc_hf, name)\n"
        "lazy = {'highspy', 'pulp', 'lm_eval', 'matplotlib', 'adacc_hf.reports.report'}\n"
        "print(sorted(lazy & set(sys.modules)), torch.cuda.is_initialized())"
    )
    assert run_python(code, cwd=tmp_path) == "[] False"


@pytest.mark.parametrize("name", adacc_hf.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(adacc_hf, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = adacc_hf.nonsense


@pytest.mark.parametrize("folder", ["kernels", "tests"])
def test_folder_stays_a_namespace(folder: str) -> None:
    """With an `__init__.py`, ./kernels would hide Hugging Face's package and tests/ would put the root on sys.path."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("present", [False, True], ids=["hf-kernels-absent", "hf-kernels-present"])
def test_trainer_imports_from_the_repository_root(tmp_path: Path, present: bool) -> None:
    installed = importlib.util.find_spec("kernels")
    if not present and installed is not None and installed.origin is not None:
        pytest.skip("Hugging Face's kernels package is installed: only the other case can be tried")
    if present:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text(FAKE_KERNELS)
        from transformers.utils.import_utils import KERNELS_MIN_VERSION  # each release takes others

        (tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info").mkdir()
        (tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
        )
    code = (
        "from transformers import Trainer\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import kernels, adacc_hf.kernels.codecs\n"
        "print(is_kernels_available(), kernels.__file__)"
    )
    expected = f"True {tmp_path / 'kernels' / '__init__.py'}" if present else "False None"
    assert run_python(code, cwd=ROOT, PYTHONPATH=str(tmp_path)) == expected


def test_solving_side_imports_no_torch() -> None:
    """Followed through the core's own modules, so that no helper of theirs brings torch in either."""
    reached, pending = set(), [ROOT / "adacc_hf" / f"{name}.py" for name in TORCH_FREE]
    while pending:
        path = pending.pop()
        if path not in reached:
            reached.add(path)
            pending += [file for file in CORE if imports_file(path, file)]
    assert offending(sorted(reached), ("torch", "transformers", "accelerate", "triton")) == []


def imports_file(path: Path, file: Path) -> bool:
    if file.stem == "__init__":
        return False
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return any(imports_any(name, (module,)) for name in imported_modules(path))


def test_kernels_import_only_each_other() -> None:
    names = [(path, name) for path in python_files("kernels") for name in imported_modules(path)]
    own = [(path, name) for path, name in names if imports_any(name, ("adacc_hf",))]
    assert [f"{path.name}: {name}" for path, name in own if not imports_any(name, ("adacc_hf.kernels",))] == []


def test_core_imports_neither_callbacks_nor_eval() -> None:
    paths = [
        path for path in CORE if path != ROOT / "adacc_hf" / "__init__.py"
    ]  # which resolves the callbacks' names on first use
    assert offending(paths, ("adacc_hf.callbacks", "adacc_hf.eval")) == []


def test_callbacks_do_not_import_eval() -> None:
    assert offending(python_files("callbacks"), ("adacc_hf.eval",)) == []


def test_codecs_are_named_in_their_own_files_alone() -> None:
    """The core asks the registry for what suits; docstrings, comments and settings of callers may name codecs."""
    names = [path.stem for path in python_files("kernels") if not re.search("^_|_triton$|^codecs$", path.stem)]
    assert "bitmask" in names
    pattern = re.compile(rf"(?<![a-z])({'|'.join(names)})(?![a-z])")
    paths = [*CORE, *python_files("callbacks")]
    named = [(path, *found) for path in paths for found in code_words(path) if pattern.search(found[1])]
    assert [f"{path.relative_to(ROOT)}:{line}: {text!r}" for path, line, text in named] == []


def code_words(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a file that is no docstring, and of each module that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_nobody_imports_a_folder_by_its_bare_name() -> None:
    folders = ("adacc_hf", "callbacks", "kernels", "eval", "recipes", "tests")
    paths = [path for folder in folders for path in python_files(folder)]
    assert offending(paths, ("kernels", "callbacks", "eval", "recipes", "tests")) == []
