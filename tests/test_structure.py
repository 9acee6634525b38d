"""Structure of the repository: sizes only shrink, each file of the product has tests, and few tests read its private
attributes."""

import ast
import json
import re
import subprocess
from collections.abc import Callable
from itertools import chain, pairwise
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

MAX_PRIVATE_READS = 13
"""Most lines of tests that may read private attributes of the product. Use a public name, or observe behaviour."""
READ = re.compile(r"""(?<!\bself)\.(_[A-Za-z]\w*)|attr\([^"']*["'](_[A-Za-z]\w*)""")
"""Private name of another object's attribute, or of one that `getattr` or `setattr` names."""
OTHER_HARNESSES = ("eval", "setups", "emulated_cuda", "memory_meter", "breakages")
"""Folders whose tests and programs are left out of this count."""


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


def private_names() -> set[str]:
    """Return the private names of functions, classes and attributes that the product defines. Names that objects of
    torch and namedtuples have too, and the methods that notebooks call, are left out."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in product_files()]
    names = {name for text in texts for name in re.findall(r"(?:\bdef |\bclass |\bself\.)(_[A-Za-z]\w*)", text)}
    others = {*dir(torch.nn.Module()), *dir(NamedTuple("Pair", [])), *(name for _, name in ATTRIBUTES)}
    return {name for name in names - others if not name.startswith("_repr_")}


def private_reads(text: str, names: set[str]) -> list[str]:
    """Return the lines of a test file that read an attribute of `names` of another object, or patch it by name."""
    foreign = names - set(re.findall(r"(?:\bdef |\bclass |\bself\.)(_[A-Za-z]\w*)", text))
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("import ", "from "))]
    return [line for line in lines if not foreign.isdisjoint(filter(None, chain(*READ.findall(line))))]


def test_few_tests_read_private_attributes() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in OTHER_HARNESSES]
    names = private_names()
    reads = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted(files)
        if path != Path(__file__)
        for line in private_reads(path.read_text(encoding="utf-8"), names)
    ]
    assert len(reads) <= MAX_PRIVATE_READS, "\n".join(reads)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("policy._plans", True),
        ("monkeypatch.setattr(policy, '_plans', {})", True),
        ("policy.plans", False),
        ("self._plans", False),
        ("def _plans(): ...; policy._plans", False),
    ],
)
def test_a_private_attribute_is_found(line: str, is_found: bool) -> None:
    assert private_reads(line, {"_plans"}) == [line] * is_found
