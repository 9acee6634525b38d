"""Wheel, editable install and source checkout have the same import names. The wheel's metadata is complete."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "adacc_hf": "adacc_hf",
    "callbacks": "adacc_hf.callbacks",
    "kernels": "adacc_hf.kernels",
    "eval": "adacc_hf.eval",
}

NOT_INSTALLED = ("results", "repository", "zoo")
"""Folders in eval/ that measure this repository's own figures."""

# Prints the file of each module name. Runs with -S, which reads no .pth file, so that the environment's own install of
# the project is not used. The dependencies are added as the last entry of sys.path.
FIND_MODULES = """
import importlib.util, json, site, sys
install, packages, names = json.loads(sys.argv[1])
if install:
    site.addsitedir(install)
sys.path.append(packages)
import adacc_hf
print(json.dumps({name: importlib.util.find_spec(name).origin for name in names}))
"""


def module_files() -> dict[str, Path]:
    """Return the path of every module of the package, relative to the repository root, by import name."""
    modules = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if set(NOT_INSTALLED).intersection(path.parts):
                continue
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            modules[".".join(part for part in parts if part != "__init__")] = path.relative_to(ROOT)
    return modules


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the source tree, because a build leaves folders in its source tree."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def run_in(folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    process = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    run_in(source, "-m", "pip", "wheel", ".", *options, "--wheel-dir", str(target))
    return next(target.glob("adacc_hf-*.whl"))


@pytest.fixture(scope="module")
def plain_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel, as `pip install .` does in site-packages."""
    target = tmp_path_factory.mktemp("plain")
    zipfile.ZipFile(wheel).extractall(target)
    return target


@pytest.fixture(scope="module")
def editable_install(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a .pth file and a finder for the source, as `pip install -e .` does in site-packages."""
    target = tmp_path_factory.mktemp("editable")
    run_in(source, "-c", f"from setuptools import build_meta; build_meta.build_editable({str(target)!r})")
    zipfile.ZipFile(next(target.glob("*.whl"))).extractall(target)
    return target


def find_modules(cwd: Path, install: Path | None) -> dict[str, Path]:
    """Return the file of each module of the project by import name, with `cwd` first on sys.path."""
    arguments = json.dumps([install and str(install), sysconfig.get_paths()["purelib"], sorted(module_files())])
    origins = json.loads(run_in(cwd, "-S", "-c", FIND_MODULES, arguments))
    return {name: Path(origin) for name, origin in origins.items()}


def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    """Data files included: a file that package_data omits would be missing only in an installed package."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        "/".join((*FOLDERS[folder].split("."), *path.relative_to(ROOT / folder).parts))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", *NOT_INSTALLED}.intersection(path.parts)
    }
    assert names == expected


def test_what_is_installed_imports_nothing_that_is_not() -> None:
    left_out = tuple(f"adacc_hf.eval.{folder}" for folder in NOT_INSTALLED)
    for path in module_files().values():
        imported = [
            name
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        ]
        assert not [name for name in imported if name.startswith(left_out)], path


def test_wheel_names_its_console_script_and_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    scripts = next(name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "adacc = adacc_hf.cli:main" in archive.read(scripts).decode()
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


def metadata_of(folder: Path, target: Path) -> Message:
    """Return the metadata that a wheel of the source tree `folder` has."""
    command = f"from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel({str(target)!r}))"
    name = run_in(folder, "-c", command).splitlines()[-1]
    return message_from_string((target / name / "METADATA").read_text(encoding="utf-8"))


def link_targets(description: str) -> list[str]:
    return re.findall(r"\]\(([^()\s]+)\)", description)


def test_wheel_has_complete_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_string(archive.read(name).decode())
    for field in ("Summary", "Author", "Keywords", "Project-URL", "Requires-Python"):
        assert metadata[field], field
    assert "Apache-2.0" in (metadata["License"] or metadata["License-Expression"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    pythons = {c.rpartition(" ")[2] for c in classifiers if re.search(r"Python :: 3\.\d+$", c)}
    assert metadata["Requires-Python"] == f">={min(pythons, key=lambda text: int(text[2:]))}"
    assert "Typing :: Typed" in classifiers
    assert any(url.startswith("Paper, https://arxiv.org/") for url in metadata.get_all("Project-URL") or [])
    assert {"recipes", "sft", "plot"} <= set(metadata.get_all("Provides-Extra") or [])


def test_description_has_no_link_that_breaks_outside_of_the_repository(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    description = message_from_string(archive.read(name).decode()).get_payload()
    assert "# adacc_hf" in description
    assert [target for target in link_targets(description) if not target.startswith("https://")] == []


def test_the_address_of_the_repository_is_the_base_of_all_links(source: Path, tmp_path: Path) -> None:
    """With an address in setup.cfg, each link leads to a file of the repository at the version's tag."""
    copy = shutil.copytree(source, tmp_path / "source")
    settings = (copy / "setup.cfg").read_text(encoding="utf-8")
    filled, count = re.subn(r"(?m)^url =.*$", "url = https://example.org/team/adacc_hf", settings)
    assert count == 1
    (copy / "setup.cfg").write_text(filled, encoding="utf-8")
    metadata = metadata_of(copy, tmp_path)
    start = "https://example.org/team/adacc_hf/"
    tag = f"v{metadata['Version']}/"
    labels = {url.partition(",")[0] for url in metadata.get_all("Project-URL") or []}
    assert labels >= {"Repository", "Documentation", "Changelog", "Issues", "Paper"}
    targets = [target for target in link_targets(metadata.get_payload()) if target.startswith(start)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<URL of" not in metadata.get_payload()
    relative = [target for target in link_targets(readme) if not target.startswith(("https://", "#"))]
    assert len(targets) == len(relative)
    for target in targets:
        kind, path = target.removeprefix(start).split(tag)
        assert kind == ("raw/" if path.endswith((".svg", ".png")) else "blob/"), target
        assert (ROOT / path.partition("#")[0]).is_file(), target


def test_install_page_lists_every_extra() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    page = (ROOT / "docs" / "INSTALL.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(config["options.extras_require"])


def test_citation_names_the_version_and_the_paper() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    source = (ROOT / "adacc_hf" / "artifacts" / "files.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    assert "arXiv:2508.00806" in citation


def test_plain_install_resolves_every_module(plain_install: Path, tmp_path: Path) -> None:
    origins = find_modules(tmp_path, plain_install)
    assert all(path.is_relative_to(plain_install) for path in origins.values()), origins


@pytest.mark.parametrize("from_root", [False, True], ids=["elsewhere", "from-root"])
def test_editable_install_resolves_every_module(editable_install, source, tmp_path, from_root):
    origins = find_modules(source if from_root else tmp_path, editable_install)
    assert {name: source / path for name, path in module_files().items()} == origins


@pytest.mark.parametrize("installed", [False, True], ids=["not-installed", "plain-install"])
def test_source_checkout_resolves_every_module(plain_install: Path, source: Path, installed: bool) -> None:
    """With the root on sys.path, ./adacc_hf precedes an installed copy and must find its sibling folders itself."""
    origins = find_modules(source, plain_install if installed else None)
    assert {name: source / path for name, path in module_files().items()} == origins
