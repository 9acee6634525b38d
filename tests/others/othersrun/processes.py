"""Launcher of the two processes of a group of cases, metered and without network access."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory_meter import environment
from othersrun.cases import MADE, PACKAGES, RUNS

FOLDER = Path(__file__).resolve().parents[1]
SECONDS = 1500
NOWHERE = "http://127.0.0.1:9"


def run_both(group: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a group without and with the callback, at the same time with one thread each. Return both outcomes."""
    results = RUNS / "results"
    results.mkdir(parents=True, exist_ok=True)
    targets = {mode: results / f"{group.replace(' ', '-')}.{mode}.json" for mode in ("plain", "adacc")}
    processes = []
    for mode, target in targets.items():
        target.unlink(missing_ok=True)
        command = [sys.executable, FOLDER / "othersrun" / "child.py", group, mode, target]
        with target.with_suffix(".log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=RUNS, env=_environment(mode), stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return tuple(_read(target) for target in targets.values())


def _read(target: Path) -> dict[str, Any]:
    if not target.exists():
        raise RuntimeError(f"the process ended without a result: {target.with_suffix('.log').read_text()[-4000:]}")
    return json.loads(target.read_text())


def _environment(mode: str) -> dict[str, str]:
    paths = [str(PACKAGES), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **environment(),
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HOME": str(MADE),
        "HF_HUB_OFFLINE": "1",
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "http_proxy": NOWHERE,
        "https_proxy": NOWHERE,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ADACC_HF_PROFILES": str(RUNS / f"profiles-{mode}"),
    }
