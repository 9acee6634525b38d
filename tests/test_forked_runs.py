"""Runs of scripts in forks: output, exit statuses, and the end of all ranks after one failed."""

from pathlib import Path

import pytest
from forked_runs import run_forked

SCRIPT = """
import os, sys, time

variables = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "OWN")]
print(*variables, os.path.basename(os.getcwd()), __name__)
if sys.argv[1] == "exit":
    sys.exit(3)
if sys.argv[1] == "fail":
    if os.environ["RANK"] == "0":
        time.sleep(600)  # longer than the deadline of run_forked, which would return 124
    raise ValueError("planned")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_a_script_runs_in_its_folder_with_its_variables(script: Path) -> None:
    process = run_forked(script, "end", cwd=script.parent, OWN="value")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == f"None None value {script.parent.name} __main__\n"


def test_ranks_have_numbers_and_their_output_is_in_order(script: Path) -> None:
    process = run_forked(script, "end", num_ranks=2, cwd=script.parent)
    assert [line.split()[:2] for line in process.stdout.splitlines()] == [["0", "2"], ["1", "2"]]


def test_a_rank_that_fails_ends_the_others(script: Path) -> None:
    process = run_forked(script, "fail", num_ranks=2)
    assert process.returncode == 1
    assert "ValueError: planned" in process.stderr


def test_a_run_that_takes_too_long_is_killed(script: Path) -> None:
    (script.parent / "sleep.py").write_text("import time; time.sleep(600)")
    assert run_forked(script.parent / "sleep.py", timeout=1).returncode not in (0, None)
