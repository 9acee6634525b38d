"""Settings and fixtures for all tests."""

import ast
import gc
import hashlib
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy
import psutil
import pytest
from hypothesis import settings

# Let assertions in the builders show the compared values, as in tests.
pytest.register_assert_rewrite(*(path.stem for path in (Path(__file__).parent / "builders").glob("*.py")))

# Draw the same examples in each run, so that a verdict depends on the change alone. `make test-nightly` draws new ones.
# There is no deadline, because the time of an example depends on the machine.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("fresh", deadline=None, print_blob=True)
settings.load_profile("repeatable")


# Tiers. A test function costs the CPU seconds of all its cases, which test_seconds.txt lists. Each tier has a limit for
# one function. If a function costs more, the tier runs as many of its cases as fit into the limit, or none if a single
# case does not fit. The gate runs cases up to GATE_CASES, but one case of each function that fits into its limit. A
# function that is not in the list is cheap. The marker `gate` overrides the limit of the gate.

SECONDS_FILE = Path(__file__).parent / "test_seconds.txt"
TIERS = {"slow": 0.55, "nightly": 2.0}
"""Limit in CPU seconds of one function, by the marker of the cases that exceed it. `make test` leaves out the cases
marked `slow`, and `make test-all` those marked `nightly`."""
GATE_CASES = 1.0
"""Limit in CPU seconds of the gate for the cases of one function after the first, which mostly run the same code."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help=f"write {SECONDS_FILE.name} from the measured times")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("write_seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_SecondsWriter())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that a tier leaves out, and put files with costly functions first. The last tests are then short,
    so that no worker waits long for the others. Tests of one file stay together, because they share fixtures."""
    lines = SECONDS_FILE.read_text(encoding="utf-8").splitlines()
    costs = {function: float(seconds) for seconds, function in map(str.split, lines)}
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[_function(item.nodeid)].append(item)
    for function, seconds in costs.items():
        for item in _left_out(cases[function], seconds, TIERS["slow"]):
            item.add_marker("slow")
        fits = seconds <= TIERS["nightly"] * len(cases[function])
        for item in _left_out(cases[function], seconds, GATE_CASES, least=int(fits)):
            if item.get_closest_marker("gate") is None:
                item.add_marker("nightly")
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker("slow")
    costly_files = {function.partition("::")[0] for function in costs}
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in costly_files)


def _left_out(cases: list[pytest.Item], seconds: float, limit: float, least: int = 0) -> list[pytest.Item]:
    """Return the cases that a tier leaves out, if all cases together take `seconds` and may take `limit`. Cases are
    chosen by a hash of their names: every n-th case would favour one value of a parameter."""
    if seconds <= limit:
        return []
    number = max(least, int(limit / seconds * len(cases)))
    return sorted(cases, key=lambda item: hashlib.md5(item.nodeid.encode()).digest())[number:]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, skip files without GPU tests, because their imports may be missing on a machine with a GPU."""
    is_test_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "gpu" or not is_test_file:
        return None
    return None if "pytest.mark.gpu" in collection_path.read_text(encoding="utf-8") else True


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test draw the same numbers, whichever tests its worker ran before."""
    random.seed(0)
    numpy.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the CPU time of this process and its children so far to each report, if times are written."""
    report = yield
    if item.config.getoption("write_seconds"):
        report.user_properties = [("cpu", _cpu_seconds())]
    return report


def _cpu_seconds() -> float:
    seconds = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):  # the child has ended
            seconds += sum(process.cpu_times()[:4])
    return seconds


class _SecondsWriter:
    """Plugin that sums the CPU times of each function's cases, in the process that receives all reports."""

    def __init__(self) -> None:
        self._last: dict[str | None, float] = defaultdict(float)
        """CPU time at the latest report of each worker."""
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worker, cpu = getattr(report, "worker_id", None), dict(report.user_properties)["cpu"]
        if report.when != "setup" or worker in self._last:  # the first setup contains the start of the worker
            self._seconds[_function(report.nodeid)] += max(0.0, cpu - self._last[worker])
        self._last[worker] = cpu

    def pytest_sessionfinish(self) -> None:
        costly = sorted((name, seconds) for name, seconds in self._seconds.items() if seconds > min(TIERS.values()))
        SECONDS_FILE.write_text("".join(f"{seconds:.1f} {name}\n" for name, seconds in costly), encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Take the objects of earlier modules out of the garbage collector's search, which many tests start. A worker holds
    millions of objects after some hundred tests: imported modules, and what Dynamo caches. One search through them
    takes 5 s, and a profile makes several."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def one_thread():
    """Use one thread, so that torch adds floats in the same order in each run. Small models need no more threads."""
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(previous)


@pytest.fixture(scope="session")
def peak_of():
    """Return `peak_of(policy)`: the expected peak of a step on the CPU, with a tolerance of 512 bytes. Most predictions
    are exact. The tolerance is for scalars, tensors of 8 bytes each, that operators keep temporarily or that the
    Trainer keeps: at most 248 bytes were measured."""
    return lambda policy: pytest.approx(policy.predicted_peak_bytes, abs=512)


@pytest.fixture
def tiny_budgets(monkeypatch):
    """Allow budgets of a few bytes, which are rejected by default as probable errors."""
    from adacc_hf.artifacts.budget_values import check_memory_budget

    monkeypatch.setattr(check_memory_budget, "__defaults__", (1,))


@pytest.fixture(scope="session")
def private_uses():
    """Return `private_uses(path)`: (line, name) of each private name of another package that the file uses. These are
    imports and attributes with a leading underscore in a part of the name, and attributes accessed by `getattr` and
    similar functions. The file's own names, and the names of adacc_hf's files that it imports from, are left out.
    Modules have their full names, not their aliases."""
    return _private_uses


_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller")
_PUBLIC = ("_replace", "_asdict", "_fields", "_make", "_getframe")
"""Documented names of namedtuples and of `sys` that start with an underscore."""


def _private_uses(path: Path) -> list[tuple[int, str]]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    full_names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    imported_files = [file for file in {_file_of(node.module) for node in imports} if file.is_file()]
    own = _own_names(path).union(*map(_own_names, imported_files))
    uses = [(node.lineno, name) for node in imports for name in (f"{node.module}.{a.name}" for a in node.names)]
    for node in nodes:
        if isinstance(node, ast.Import):
            uses += [(node.lineno, alias.name) for alias in node.names]
        elif (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and node.attr not in own
            and not _is_own(node.value)
        ):
            root, _, rest = ast.unparse(node.value).partition(".")
            base = ".".join(filter(None, (full_names.get(root, root), rest)))
            uses.append((node.lineno, f"{base}.{node.attr}"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            uses += [(node.lineno, f"?.{text}") for text in texts if isinstance(text, str) and text not in own]
    return [
        (line, name)
        for line, name in sorted(uses)
        if not name.startswith("adacc_hf.")
        and any(map(_is_private, name.split(".")))
        and name.rpartition(".")[2] not in _PUBLIC
    ]


def _is_own(base: ast.expr) -> bool:
    return ast.unparse(base) in ("self", "cls", "super()")


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_"


def _file_of(module: str) -> Path:
    """Return the path of `module` in this checkout, where callbacks/ and kernels/ are next to adacc_hf/."""
    parts = module.split(".")
    return Path(__file__).parents[1].joinpath(*parts[parts[1:2] in (["callbacks"], ["kernels"]) :]).with_suffix(".py")


@cache
def _own_names(path: Path) -> set[str]:
    """Return the names of functions, classes, fields and attributes that a file defines. Names that torch's objects
    have too are left out: the file's own objects use these names as attributes of `self`."""
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


@pytest.fixture
def few_rows(monkeypatch):
    """Consider tiles from 8 rows (tokens) on, and tiles of 2 rows or more."""
    from adacc_hf.artifacts import tiles

    monkeypatch.setattr(tiles, "MIN_ROWS", 8)
    monkeypatch.setattr(tiles, "MIN_TILE_ROWS", 2)
