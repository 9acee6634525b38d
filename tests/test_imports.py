"""Imports of the package: loaded modules, shadowed packages, and the order of the folders."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted((ROOT / "adacc_hf").rglob("*.py"))
# Folders from the bottom up. A folder imports only folders below it, also within functions and for type checkers.
STAIRCASE = (
    "kernels", "artifacts", "torch_glue", "tape", "head", "run", "price", "solve", "adapt", "callbacks", "integrations",
    "compact", "reports", "estimate", "compiler",  # extensions, which no folder above imports
    "command line",
)  # fmt: skip
# Modules that read, write and solve records. They must work without torch.
TORCH_FREE = (
    "artifacts/units",
    "artifacts/files",
    "artifacts/errors",
    "artifacts/config",
    "artifacts/policy",
    "artifacts/profile",
    "artifacts/memory_simulator",
    "solve/solver",
    "solve/batch_plan",
)

# Substitute for Hugging Face's `kernels` package: any name can be imported, every decorator is the identity.


def run_python(code: str, *, cwd: Path, **environment: str) -> str:
    """Return the standard output of `python -c code`, run in `cwd`, which is the first entry of sys.path then."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@cache
def imported_modules(path: Path) -> list[str]:
    """Return the names that the file imports, also inside functions, but not under TYPE_CHECKING."""
    names: list[str] = []
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it from adacc_hf"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            pending += ast.iter_child_nodes(node)
    return names


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


@pytest.mark.parametrize("folder", ["kernels", "tests"])
def test_folder_stays_a_namespace(folder: str) -> None:
    """With an `__init__.py`, ./kernels would hide Hugging Face's package and tests/ would put the root on sys.path."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_solving_side_imports_no_torch() -> None:
    """Follow imports through all modules of the core, so that no helper imports torch either."""
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


def room_of(module: str) -> str | None:
    """Return the folder of a module of the product, or None for other modules."""
    parts = module.split(".")
    if parts[0] != "adacc_hf" or parts[1:2] == ["eval"]:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in STAIRCASE else STAIRCASE[-1]


def lines_that_import(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, imported name) for all imports of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def product_modules() -> Iterator[tuple[str, Path]]:
    """Yield (module, file) of the product, without the top packages' `__init__.py`, which are in no folder."""
    for folder, package in (
        ("adacc_hf", "adacc_hf"),
        ("callbacks", "adacc_hf.callbacks"),
        ("kernels", "adacc_hf.kernels"),
    ):
        for path in python_files(folder):
            if path.name != "__init__.py" or path.parent.name in STAIRCASE:
                inside = path.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join((package, *inside)), path


def test_imports_go_down_the_staircase() -> None:
    violations = []
    for module, path in product_modules():
        own = room_of(module)
        for line, name in lines_that_import(path):
            other = room_of(name)
            if other is not None and STAIRCASE.index(other) > STAIRCASE.index(own):
                violations.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {name}, of {other}")
    assert sorted(set(violations)) == []


def test_every_folder_of_the_product_is_on_the_staircase() -> None:
    folders = {path.parent.name for path in CORE if path.parent != ROOT / "adacc_hf"}
    assert folders == set(STAIRCASE) - {"kernels", "callbacks", "command line"}


def test_no_file_name_means_two_things() -> None:
    stems = [path.stem for _, path in product_modules() if path.stem != "__init__"]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []


def test_kernels_import_only_each_other() -> None:
    names = [(path, name) for path in python_files("kernels") for name in imported_modules(path)]
    own = [(path, name) for path, name in names if imports_any(name, ("adacc_hf",))]
    assert [f"{path.name}: {name}" for path, name in own if not imports_any(name, ("adacc_hf.kernels",))] == []


def test_only_eval_imports_eval() -> None:
    assert offending([*CORE, *python_files("callbacks"), *python_files("recipes")], ("adacc_hf.eval",)) == []


def test_codecs_are_named_in_their_own_files_alone() -> None:
    """The core asks the registry for suitable codecs. Docstrings, comments and callers' settings may name codecs."""
    names = [path.stem for path in python_files("kernels") if not re.search("^_|_triton$|^codecs$", path.stem)]
    assert "bitmask" in names
    pattern = re.compile(rf"(?<![a-z])({'|'.join(names)})(?![a-z])")
    paths = [*CORE, *python_files("callbacks")]
    mentions = [(path, *word) for path in paths for word in code_words(path) if pattern.search(word[1])]
    assert [f"{path.relative_to(ROOT)}:{line}: {text!r}" for path, line, text in mentions] == []


def code_words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each string in a file, except docstrings, and of each imported module."""
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


PRIVATE_NAMES_IN = (
    ROOT / "adacc_hf" / "torch_glue" / "private.py",
    ROOT / "adacc_hf" / "torch_glue" / "dynamo.py",
    ROOT / "adacc_hf" / "torch_glue" / "dynamo_gaps.py",
    ROOT / "adacc_hf" / "compiler" / "functorch.py",
    ROOT / "callbacks" / "trainer_loop.py",
)
"""Files that may use private names of other packages. tests/callbacks/test_trainer_loop.py checks those of Trainers."""


def test_private_names_of_others_are_used_in_their_place_only(private_uses) -> None:
    files = [path for folder in ("adacc_hf", "callbacks", "kernels") for path in python_files(folder)]
    uses = [(path, *use) for path in files if path not in PRIVATE_NAMES_IN for use in private_uses(path)]
    assert [f"{path.relative_to(ROOT)}:{line}: {name}" for path, line, name in uses] == []
