"""Complete training runs in a process whose allocator refuses requests above the budget."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "limited" / "__main__.py"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the meter is preloaded as Linux does"),
    pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="needs a C++ compiler"),
]


def test_the_first_steps_and_the_profile_keep_to_the_budget() -> None:
    """The budget is a fiftieth above the floor. A profile of the whole batch would need 1.4 times as much."""
    specification = importlib.util.spec_from_file_location("limited", PATH)
    limited = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(limited)
    budget = limited.budgets_of("llama", [], 1)[0]
    results = limited.train("llama", "--budget", str(budget), limit=budget)
    assert "error" not in results, results
    assert (results["refusals"], results["steps"]) == (0, 8)
