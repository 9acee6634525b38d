"""A complete training run in a process whose allocator refuses requests above the budget."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUPS = Path(__file__).parents[1] / "setups"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the meter is preloaded as Linux does"),
    pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="needs a C++ compiler"),
]


def test_the_first_steps_and_the_profile_keep_to_the_budget(tmp_path: Path) -> None:
    options = ["--setups", "run_clm-gpt2", "--fractions", "0.5", "--steps", "8", "--limit", "--json", tmp_path / "runs"]
    subprocess.run([sys.executable, SETUPS, *options], capture_output=True, check=True)
    (run,) = json.loads((tmp_path / "runs").read_text())["run_clm-gpt2"]["budgets"].values()
    assert run["error"] is None
    assert len(run["peaks"]) == 8
    assert max(run["peaks"]) <= run["budget"]
    assert run["figures"]["first_difference"] is None
