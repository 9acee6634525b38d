"""Tests of the CUDA code on an emulated device, see `emulated_cuda/emulated_cuda.py`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SELECTION = ("tests/adacc_hf/test_gpu.py", "tests/callbacks/test_gpu.py")

pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA: run the tests marked gpu"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="its C++ was written for torch 2.13"),
    pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="needs a C++ compiler"),
]


@pytest.mark.timeout(600)
def test_the_checkout_is_on_the_path_of_what_runs_on_it(tmp_path: Path) -> None:
    """A machine with a GPU has torch but not adacc_hf. Child processes find the checkout in any folder too."""
    command = [sys.executable, ROOT / "tests/emulated_cuda", "-c", "import os; print(os.environ['PYTHONPATH'])"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "own"})
    paths = run.stdout.splitlines()[-1].split(os.pathsep)
    assert paths == [str(ROOT / "tests/emulated_cuda"), str(ROOT), "own"], run.stderr[-4000:]


@pytest.mark.timeout(600)  # it starts Python anew and may compile, which takes minutes on a busy machine
def test_the_tests_for_gpus_pass_on_an_emulated_device() -> None:
    command = [sys.executable, ROOT / "tests/emulated_cuda", "-m", "pytest", "-q", "-m", "gpu"]
    command += ["-p", "no:cacheprovider", *SELECTION]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "passed" in run.stdout


@pytest.mark.timeout(600)
def test_auto_leaves_room_for_the_fragments_of_the_allocator() -> None:
    """Without `FRAGMENTATION_SHARE`, policies that fill the device up to `memory_margin` run out of memory."""
    command = [sys.executable, ROOT / "tests/emulated_cuda", ROOT / "tests/emulated_cuda/fragments.py"]
    # The allocator has the default settings: `eval` sets others for all.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/builders"), "PYTORCH_CUDA_ALLOC_CONF": ""}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert sum(outcomes["with"]) <= 1 < sum(outcomes["without"]), outcomes
