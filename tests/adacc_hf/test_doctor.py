"""Findings and advice of `adacc doctor`."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo import config

from adacc_hf import doctor
from adacc_hf.cli import main


def examine(subject: str) -> doctor.Finding:
    """Return the finding about `subject`."""
    (finding,) = [finding for finding in doctor.examine() if finding.subject == subject]
    return finding


def test_it_prints_versions_device_and_what_is_used(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"ok  torch         {torch.__version__}" in lines
    assert any(line.startswith("ok  device") and "CPU" in line for line in lines)
    assert sum(line.startswith(("ok", "!!")) for line in lines) == len(list(doctor.examine()))


@pytest.mark.parametrize(("command", "first"), [("doctor", "ok  python"), ("codecs", "compressed size")])
def test_the_first_line_comes_before_torch_is_imported(command, first):
    code = f"""
import builtins, sys
from adacc_hf.cli import main

def print_first(text, **_):
    sys.stdout.write(f"{{'torch' in sys.modules}} {{text}}")
    raise SystemExit

builtins.print = print_first
main([{command!r}])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert run.stdout.startswith(f"False {first}"), run.stdout + run.stderr


def test_without_a_compiler_codecs_are_slow(monkeypatch):
    assert examine("codecs").advice is None
    monkeypatch.setattr("adacc_hf.kernels._cpu.library", lambda: None)
    assert "g++" in examine("codecs").advice


def test_a_package_that_is_missing_is_named_with_the_version_asked_for(monkeypatch):
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", version)
    assert "pip install 'highspy>=1.9'" in examine("highspy").advice


@pytest.mark.parametrize(
    ("name", "installed", "advice"),
    [
        ("torch", "1.0.0+cpu", "pip install 'torch>=2.11'"),
        ("torch", "2.12.0.dev20260101+cu130", None),
        ("pulp", "3.3.1", "pip install 'pulp<4,>=3.3.2'"),
        ("pulp", "4.0", "pip install 'pulp<4,>=3.3.2'"),
    ],
)
def test_a_package_outside_the_required_releases_has_advice(monkeypatch, name, installed, advice):
    assert examine(name).advice is None
    monkeypatch.setattr(doctor, "version", lambda _: installed)
    assert examine(name) == doctor.Finding(name, installed, advice)


def test_a_checkout_that_is_not_installed_is_examined(monkeypatch):
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", requires)
    assert "pip install" in examine("adacc_hf").advice
    assert examine("torch").advice is None


def test_blocks_without_guards_have_the_advice_for_their_cause():
    assert examine("guards").advice is None
    with config.patch(disable=True):
        assert "unset TORCHDYNAMO_DISABLE" in examine("guards").advice


def test_without_matplotlib_and_triton(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert "adacc_hf[plot]" in examine("pictures").advice


def test_a_host_that_is_slow_to_launch(monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_HOST_US", 0.0)
    assert "larger batches" in examine("host").advice


@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("major", [8, 9])
def test_a_gpu(monkeypatch, expands, major):
    properties = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: None)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr("adacc_hf.torch_glue.memory.has_expandable_segments", lambda: expands)
    findings = {finding.subject: finding for finding in doctor.examine_gpu(torch.device("cuda"))}
    assert findings["device"].status.startswith("Some GPU, 80 GiB")
    assert (findings["allocator"].advice is None) == expands
    assert (findings["attention"].advice is None) == (major < 9)
