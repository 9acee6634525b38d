"""The first minutes on a GPU, from a source checkout, on a machine that has torch, triton and transformers only.

    make gpu-bundle                                                     # where there is a package index
    python3 -m adacc_hf.eval.first_gpu --out DIR                        # there, as often as there is time
    python3 -m adacc_hf.eval.first_gpu --out DIR --from records.tar.gz  # on another machine, or a fresh one

Each call is a slice of at most --minutes of `adacc eval all --device cuda`, what tells most first, and goes on where
the one before was cut. After every point DIR has all of it: points.md to read, records.tar.gz to go on from. What
failed stays so, and takes nothing with it. Ends with status 3 while there is more to do.

The packages that are missing come from the wheels of `make gpu-bundle`, which are unpacked beside the records: nothing
is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

STARTED = time.monotonic()
"""Torch is not imported yet, which takes its time too."""
ROOT = Path(__file__).resolve().parents[1]
BUNDLE = Path("build/gpu-bundle")
COMMIT = "COMMIT"
"""The file of a bundle that `make gpu-bundle` writes the commit to."""
MINUTES = 9.0
"""Of a slice, where a command may take ten."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one slice. Returns 0 if all is measured, 1 if something failed, 3 if there is more to do."""
    parser = argparse.ArgumentParser(prog="first_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for points.md and records.tar.gz")
    parser.add_argument("--from", type=Path, dest="archive", help="records.tar.gz of an earlier slice to go on from")
    parser.add_argument("--wheels", type=Path, default=ROOT / BUNDLE, help=f"folder of wheels (default: {BUNDLE})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of this slice (default: {MINUTES:g})")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/first-gpu", help="where records grow")
    parser.add_argument("--toy", action="store_true", help="the smallest of models: to see that all of it runs")
    parser.add_argument("--notes", help="text to keep in the records (default: the commit, by git or by the bundle)")
    arguments = parser.parse_args(argv)
    add_wheels(arguments.wheels, arguments.work / "site")

    # They import what the wheels may have; the last is what takes long.
    from adacc_hf.cli import main as adacc
    from adacc_hf.eval import run_all  # noqa: F401
    from adacc_hf.eval.records.points import restore

    records = arguments.work / ("toy" if arguments.toy else "records")
    if arguments.archive is not None:
        restore(arguments.archive, records)
    minutes = max(0.0, arguments.minutes - (time.monotonic() - STARTED) / 60)
    command = ["eval", "all", "--device=cuda", "--resume", f"--minutes={minutes:.3f}"]
    notes = commit_note(ROOT, arguments.wheels) if arguments.notes is None else arguments.notes
    command += ["--output", str(records / "all.json"), "--report", str(arguments.out), f"--notes={notes}"]
    return adacc([*command, *(["--toy"] if arguments.toy else [])])


def commit_note(checkout: Path, wheels: Path) -> str:
    """Return what tells which code is measured: the checkout's commit, or that of which the bundle was made.

    A checkout that was copied has no git, and a bundle is one of the things that are copied with it.
    """
    if (checkout / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
            return f"commit {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"
    bundled = wheels / COMMIT
    if bundled.is_file():
        return f"commit {bundled.read_text(encoding='utf-8').strip()} when the bundle was made"
    print(f"no git and no {bundled}: give the commit as --notes, or the records tell of none", file=sys.stderr)
    return ""


def add_wheels(wheels: Path, site: Path) -> list[str]:
    """Unpack what is not installed here into `site`, for this process and those it starts; its wheels' names."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not is_installed(distribution_of(wheel))]
    for wheel in missing:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    if missing:
        sys.path.append(str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
    return [wheel.name for wheel in missing]


def distribution_of(wheel: Path) -> str:
    """The name of the project that a wheel's file name begins with."""
    return re.sub(r"_", "-", wheel.name.partition("-")[0])


def is_installed(name: str) -> bool:
    """Whether a package of that project is here already, by whatever version."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
