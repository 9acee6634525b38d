"""Other packages' scripts, trainers and methods train equally with and without the callback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from othersrun import cases, tiny

VERIFY = ("-m", "adacc_hf.cli", "verify", "--memory-budget", "0.6", "--exact", "--")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Variables of a process without network access that finds the packages, and models and data made for them."""
    if not cases.PACKAGES.exists():
        pytest.skip("the packages are missing: run `make test-others`, which fetches them")
    tiny.make(cases.MADE)
    paths = [str(cases.PACKAGES), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    return {
        **os.environ,
        **proxies,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HOME": str(cases.MADE),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.mark.others
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_others(case, environment):
    command = [sys.executable, *VERIFY, *case.command]
    run = subprocess.run(command, cwd=cases.RUNS, env=environment, capture_output=True, text=True)
    if case.refused is not None:
        assert run.returncode == 1
        assert case.refused in run.stderr
        return
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-8000:]}"
    has_policy = re.search(r"policy: [^.]* [1-9]\d* recompute", run.stdout) is not None
    assert has_policy == (case.idle is None), "the callback did nothing" if case.idle is None else "it has a policy"
