"""Runs of training scripts on several CPU ranks with DeepSpeed, which is not in the path of other tests (Makefile)."""

import json
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from forked_runs import run_forked

FOLDER = Path(sys.prefix) / "deepspeed"
"""Folder in which `make venv` installs DeepSpeed."""

needs_deepspeed = pytest.mark.skipif(
    not FOLDER.is_dir() and find_spec("deepspeed") is None, reason="DeepSpeed is not installed: run `make venv`"
)


@cache
def run_script(script: str, num_ranks: int, *arguments: str) -> dict:
    """Run the Python code `script` on `num_ranks` ranks, and return its result.json in the folder sys.argv[1]. The
    following arguments are `arguments`. Runs are deterministic, so equal runs are made once per process."""
    with TemporaryDirectory(prefix="adacc_hf-tests-") as folder:
        path = Path(folder) / "train.py"
        path.write_text(script)
        run = run_forked(
            path, folder, *arguments, num_ranks=num_ranks, paths=(str(FOLDER),), modules=("deepspeed_without_kernels",)
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return json.loads((Path(folder) / "result.json").read_text())
