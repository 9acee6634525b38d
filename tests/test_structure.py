"""Structure of the repository: sizes only shrink, each file of the product has tests, and few tests read its private
attributes."""

import ast
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from forked_runs import run_forked

from adacc_hf.torch_glue.private import ATTRIBUTES

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PRODUCT = ("adacc_hf", "callbacks", "kernels", "recipes")

LIMITS = TESTS / "limits.txt"
"""Table of the largest permitted sizes. Lower a limit to what a change has reached. To add code, first remove some."""

WITHOUT_TESTS: dict[str, str] = {
    "callbacks/startup/sitecustomize.py": "Python runs it at its start; test_launched.py starts processes",
}
"""Files of the product without a test file of their name, each with the reason. At most MAX_WITHOUT_TESTS."""
MAX_WITHOUT_TESTS = 5

MAX_PRIVATE_READERS = 9
"""Most functions of tests that may read private attributes of the product. Use a public name, or observe behaviour."""
OTHER_HARNESSES = ("eval", "setups", "emulated_cuda", "memory_meter", "breakages")
"""Folders whose tests and programs are left out of this count."""
WORD = re.compile(r"\b_[A-Za-z]\w*")


def limits_in(text: str) -> dict[str, int]:
    """Return the limits of a table like limits.txt, by measure."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name.strip(): int(limit) for limit, name in (line.split(maxsplit=1) for line in lines)}


def num_lines(*names: str) -> int:
    """Return the number of lines of Python in files, or in folders."""
    places = [ROOT / name for name in names]
    paths = [path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


MEASURES: dict[str, Callable[[], int]] = {
    "lines of the product": lambda: num_lines(*PRODUCT),
    "lines of eval": lambda: num_lines("eval"),
    "lines of tests": lambda: num_lines("tests"),
    "lines of the product's longest file": lambda: max(num_lines(name) for name in product_files()),
}


def assert_within_limit(measure: str, size: int) -> None:
    limit = limits_in(LIMITS.read_text(encoding="utf-8"))[measure]
    assert size <= limit, f"{measure}: {size}, allowed {limit}: remove code before adding more (limits.txt)"


@pytest.mark.parametrize("measure", MEASURES)
def test_sizes_are_within_their_limits(measure: str) -> None:
    assert_within_limit(measure, MEASURES[measure]())


@pytest.mark.gate
def test_a_normal_step_runs_few_files() -> None:
    """Count the product's files that run in a normal step of a Trainer: the fewest of steps 6 to 24."""
    run = run_forked(TESTS / "builders" / "normal_step.py")
    assert run.returncode == 0, run.stderr
    assert_within_limit("files of a normal step", min(json.loads(run.stdout.splitlines()[-1])))


def test_limits_only_go_down() -> None:
    """Compare the limits with those of all earlier commits."""
    path = LIMITS.relative_to(ROOT).as_posix()

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return run.stdout if run.returncode == 0 else ""  # an archive without git has no earlier commits

    tables = [limits_in(git("show", f"{commit}:{path}")) for commit in git("log", "--format=%H", "--", path).split()]
    for new, old in pairwise([limits_in(LIMITS.read_text(encoding="utf-8")), *filter(None, tables)]):
        assert new.keys() >= old.keys()
        raised = [measure for measure in old if new[measure] > old[measure]]
        assert not raised, f"limits may only go down: {raised}"


def product_files() -> list[str]:
    """Return the product's files, except for those that only gather names or start a command."""
    paths = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.stem not in ("__init__", "__main__"))


def path_of_tests(name: str) -> Path:
    """Return the test file of a file of the product. Its name has no leading underscore."""
    path = Path(name)
    return TESTS / path.parent / f"test_{path.stem.lstrip('_')}.py"


def has_tests(file: Path) -> bool:
    """Return True if the file exists and defines a test, or a class of tests."""
    if not file.is_file():
        return False
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return any(
        isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.startswith(("test_", "Test")) for node in nodes
    )


def test_each_file_of_the_product_has_a_test_file_of_its_name() -> None:
    missing = {name for name in product_files() if not has_tests(path_of_tests(name))}
    assert missing - WITHOUT_TESTS.keys() == set(), "write tests/FOLDER/test_NAME.py, or move tests of the file there"
    assert WITHOUT_TESTS.keys() - missing == set(), "remove entries of files that are gone or have tests"
    assert len(WITHOUT_TESTS) <= MAX_WITHOUT_TESTS


def is_private(name: str) -> bool:
    """Return True for a private name. `_repr_html_` and `_repr_markdown_` are public: notebooks call them."""
    return not name.startswith("_repr_") and name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def private_names() -> frozenset[str]:
    """Return the private names of functions, classes, variables and attributes that the product defines. Names that
    objects of torch and namedtuples have too are left out."""
    names: set[str] = set()
    for name in product_files():
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    others = {*dir(torch.nn.Module()), *dir(NamedTuple("Pair", [])), *(name for _, name in ATTRIBUTES)}
    return frozenset(filter(is_private, names - others))


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def reads_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node reads of another object: by attribute, by `getattr` and the like, or by import."""
    if isinstance(node, ast.Attribute):
        if is_private(node.attr) and not is_self(node.value) and not ast.unparse(node.value).startswith("torch"):
            yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("getattr", "setattr", "delattr"):
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value.rpartition(".")[2]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adacc_hf."):
        yield from (alias.name for alias in node.names if node.module != "adacc_hf.kernels")  # files, such as _cpu.py


def private_readers(text: str, names: frozenset[str]) -> set[str]:
    """Return the functions of a test file that read names of `names`; "" for the file itself. Names that the file
    defines are its own."""
    if names.isdisjoint(WORD.findall(text)):
        return set()
    tree = ast.parse(text)
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}

    def readers(node: ast.AST, place: str, is_function: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if not (names - own).isdisjoint(reads_of(child)):
                yield place
            is_named = isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not is_function
            inside = f"{place}.{child.name}".strip(".") if is_named else place
            yield from readers(child, inside, is_function or isinstance(child, ast.FunctionDef))

    return set(readers(tree, "", is_function=False))


def test_few_tests_read_private_attributes() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in OTHER_HARNESSES]
    readers = [
        f"{path.relative_to(ROOT)}: {function or 'the file'}"
        for path in sorted(files)
        for function in sorted(private_readers(path.read_text(encoding="utf-8"), private_names()))
    ]
    assert len(readers) <= MAX_PRIVATE_READERS, "\n".join(readers)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("policy._plans", True),
        ("monkeypatch.setattr(policy, '_plans', {})", True),
        ("monkeypatch.setattr('adacc_hf.solve.search.X._plans', {})", True),
        ("from adacc_hf.solve.search import _plans", True),
        ("policy.plans", False),
        ("self._plans", False),
        ("torch._plans", False),
        ("policy._replace(x=1)", False),
    ],
)
def test_a_private_attribute_is_found(line: str, is_found: bool) -> None:
    names = frozenset({"_plans"})
    assert private_readers(f"def test_it():\n    {line}\n", names) == ({"test_it"} if is_found else set())
    toy = "class Toy:\n    def run(self):\n        self._plans = 1\n\n\n"
    assert private_readers(f"{toy}def test_it():\n    {line}\n", names) == set(), "the file's own name"
