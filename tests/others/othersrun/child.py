"""Metered process that runs other packages' code, with the callback in every Trainer or without.

python child.py CASE_GROUP (plain|adacc) RESULT.json
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(FOLDER), str(FOLDER.parent / "memory_meter")]
os.environ.pop("LD_PRELOAD", None)  # child processes are not metered

from othersrun import cases, drivers  # noqa: E402
from othersrun.attach import Trainings  # noqa: E402


def run_script(case: cases.Script) -> None:
    path = cases.PACKAGES / case.path
    sys.argv = [str(path), *case.arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run(group: str, trainings: Trainings) -> dict[str, str]:
    """Run the cases of a group. Return the errors of cases by name."""
    results: dict[str, str] = {}
    for case in cases.groups()[group]:
        trainings.label = case.name
        try:
            if isinstance(case, cases.Script):
                run_script(case)
            else:
                drivers.train(case)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            results[case.name] = f"{type(error).__name__}: {error}"
    return results


def main() -> None:
    group, mode, target = sys.argv[1:]
    settings: dict[str, Any] | None = cases.LOSSLESS if mode == "adacc" else None
    trainings = Trainings(settings)
    trainings.watch()
    results = run(group, trainings)
    Path(target).write_text(json.dumps({"results": results, "trainings": trainings.records}))


if __name__ == "__main__":
    main()
