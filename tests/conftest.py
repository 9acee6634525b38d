"""What holds for all tests."""

import ast
import os
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair, and no property of ours.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Set before any import of ours, and inherited by subprocesses: no test touches the user's profiles.
_folder = tempfile.TemporaryDirectory(prefix="adacc_hf-tests-")
os.environ["ADACC_HF_PROFILES"] = str(Path(_folder.name) / "profiles")


def pytest_unconfigure() -> None:
    _folder.cleanup()


# The fast set: all tests but those of a list, of test functions with all of their parameters. A new one is fast.

SLOW_TESTS = Path(__file__).parent / "slow_tests.txt"
SLOW_SECONDS = 0.7
"""A function of tests is slow if they take longer on an average: the others together take some 5 minutes on 2 cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-slow", action="store_true", help=f"write {SLOW_TESTS.name} from what all tests took")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Stopwatch())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").split())
    for item in items:
        if _function(item.nodeid) in slow:
            item.add_marker("slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` no file is imported that has no such test: a machine with a GPU need not have what others test."""
    is_other = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "gpu" or not is_other:
        return None
    return None if "pytest.mark.gpu" in collection_path.read_text(encoding="utf-8") else True


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


class _Stopwatch:
    """Adds up what tests take, in the process that all reports come to."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        functions: dict[str, list[float]] = defaultdict(list)
        for nodeid, seconds in self._seconds.items():
            functions[_function(nodeid)].append(seconds)
        slow = sorted(name for name, taken in functions.items() if sum(taken) > SLOW_SECONDS * len(taken))
        SLOW_TESTS.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")


@pytest.fixture(scope="session")
def one_thread():
    """Sums of floats are made in one order: with several threads torch may split them otherwise from run to run.

    Models as small as those of tests are no faster with two threads either.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def peak_of():
    """`peak_of(policy)`: what the measured peak of a step on the CPU must be equal to.

    Most steps are met to the byte. The rest are scalars, in tensors of 8 bytes each, that operators hold for a while or
    that the Trainer keeps: 248 bytes were the most.
    """
    return lambda policy: pytest.approx(policy.predicted_peak_bytes, abs=512)


@pytest.fixture
def tiny_budgets(monkeypatch):
    """Budgets of a few bytes, for what is a few kilobytes large, are no slips of the pen."""
    from adacc_hf.artifacts.config import check_memory_budget

    monkeypatch.setattr(check_memory_budget, "__defaults__", (1,))


@pytest.fixture(scope="session")
def private_uses():
    """`private_uses(path)`: (line, name) of each private name of another package that the file uses.

    Imports with a part that begins with an underscore, attributes that do, and those that are asked for by name; not
    the file's own, nor those of files of ours that it imports from. Names of modules are written out, whatever they
    were imported as.
    """
    return _private_uses


_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller")
_PUBLIC = ("_replace", "_asdict", "_fields", "_make", "_getframe")
"""Of namedtuples, and of `sys`."""


def _private_uses(path: Path) -> list[tuple[int, str]]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    written_out = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names
    }
    ours = [file for file in {_file_of(node.module) for node in imports} if file.is_file()]
    own = _own_names(path).union(*map(_own_names, ours))
    found = [(node.lineno, name) for node in imports for name in (f"{node.module}.{a.name}" for a in node.names)]
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and node.attr not in own
            and not _is_own(node.value)
        ):
            root, _, rest = ast.unparse(node.value).partition(".")
            base = ".".join(filter(None, (written_out.get(root, root), rest)))
            found.append((node.lineno, f"{base}.{node.attr}"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found += [(node.lineno, f"?.{text}") for text in texts if isinstance(text, str) and text not in own]
    return [
        (line, name)
        for line, name in sorted(found)
        if not name.startswith("adacc_hf.")
        and any(map(_is_private, name.split(".")))
        and name.rpartition(".")[2] not in _PUBLIC
    ]


def _is_own(base: ast.expr) -> bool:
    return ast.unparse(base) in ("self", "cls", "super()")


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_"


def _file_of(module: str) -> Path:
    """Where `module` is, if it is one of ours; callbacks and kernels are parts of adacc_hf that lie beside it."""
    parts = module.split(".")
    return Path(__file__).parents[1].joinpath(*parts[parts[1:2] in (["callbacks"], ["kernels"]) :]).with_suffix(".py")


@cache
def _own_names(path: Path) -> set[str]:
    """The names that a file gives to functions, classes, fields and attributes of its own objects.

    Less those that objects of torch have too: its own objects have these as attributes of `self`.
    """
    from adacc_hf.torch_glue.private import ATTRIBUTES

    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
    return names - {attribute for _, attribute in ATTRIBUTES}
