"""Runs of training scripts on several CPU ranks with DeepSpeed, which is not in the path of other tests (Makefile)."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

FOLDER = Path(sys.prefix) / "deepspeed"
"""Folder in which `make venv` installs DeepSpeed."""

needs_deepspeed = pytest.mark.skipif(
    not FOLDER.is_dir() and find_spec("deepspeed") is None, reason="DeepSpeed is not installed: run `make venv`"
)


@cache
def run_script(script: str, num_ranks: int, *arguments: str) -> dict:
    """Run the Python code `script` under torchrun, and return what it wrote to result.json in the folder sys.argv[1].

    The following arguments are `arguments`. Runs are deterministic, so equal runs are made once per process.
    """
    with TemporaryDirectory(prefix="adacc_hf-tests-") as folder:
        path = Path(folder) / "train.py"
        path.write_text(script)
        paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        run = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", str(path),
             folder, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        return json.loads((Path(folder) / "result.json").read_text())
