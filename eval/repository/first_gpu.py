"""First minutes on a GPU, from a source checkout, on a machine that has only torch, triton and transformers.

    make gpu-bundle                                                     # where there is a package index
    python3 -m adacc_hf.eval.repository.first_gpu --out DIR                        # there, as often as there is time
    python3 -m adacc_hf.eval.repository.first_gpu --out DIR --from records.tar.gz  # on another machine, or a fresh one

Each call is a slice of at most --minutes of `adacc eval all --device cuda`, most important measurements first. A call
resumes where the last one stopped. After every point DIR has all results: points.md to read, records.tar.gz to resume
from. Failed points stay failed, and do not stop the others. The exit status is 3 while points remain.

Missing packages come from the wheels of `make gpu-bundle`, which are unpacked next to the records. Nothing is
installed.
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

START_TIME = time.monotonic()
"""Time of the start, before the import of torch, which counts too."""
ROOT = Path(__file__).resolve().parents[2]
BUNDLE = Path("build/gpu-bundle")
COMMIT = "COMMIT"
"""Name of the file that holds a bundle's commit. `make gpu-bundle` writes the file."""
MINUTES = 9.0
"""Default length of a slice in minutes, for machines on which a command may take ten minutes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one slice. Return 0 if everything is measured, 1 if something failed, 3 if points remain."""
    parser = argparse.ArgumentParser(prog="first_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for points.md and records.tar.gz")
    parser.add_argument("--from", type=Path, dest="archive", help="records.tar.gz of an earlier slice to resume from")
    parser.add_argument("--wheels", type=Path, default=ROOT / BUNDLE, help=f"folder of wheels (default: {BUNDLE})")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"length of this slice (default: {MINUTES:g})")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/first-gpu", help="folder of the records")
    parser.add_argument("--notes", help="text for the records (default: the commit, from git or the bundle)")
    arguments = parser.parse_args(argv)
    add_wheels(arguments.wheels, arguments.work / "site")

    # Imported here, because these modules need packages of the wheels. Importing run_all imports torch, which takes
    # long.
    from adacc_hf.cli import main as adacc
    from adacc_hf.eval.repository import run_all  # noqa: F401
    from adacc_hf.eval.repository.points import restore

    records = arguments.work / "records"
    if arguments.archive is not None:
        restore(arguments.archive, records)
    minutes = max(0.0, arguments.minutes - (time.monotonic() - START_TIME) / 60)
    command = ["eval", "all", "--device=cuda", "--resume", f"--minutes={minutes:.3f}"]
    notes = commit_note(ROOT, arguments.wheels) if arguments.notes is None else arguments.notes
    command += ["--output", str(records / "all.json"), "--report", str(arguments.out), f"--notes={notes}"]
    return adacc(command)


def commit_note(checkout: Path, wheels: Path) -> str:
    """Return a note on the measured code: the checkout's commit, or the commit of the bundle.

    A copied checkout has no git, but is copied with its bundle.
    """
    if (checkout / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
            return f"commit {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"
    commit_file = wheels / COMMIT
    if commit_file.is_file():
        return f"commit {commit_file.read_text(encoding='utf-8').strip()} when the bundle was made"
    print(
        f"no git repository and no {commit_file}: pass the commit with --notes, or the records will not name it",
        file=sys.stderr,
    )
    return ""


def add_wheels(wheels: Path, site: Path) -> list[str]:
    """Unpack into `site` all packages that are not installed, for this process and its children.

    Return the names of their wheels.
    """
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not is_installed(distribution_of(wheel))]
    for wheel in missing:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    if missing:
        sys.path.append(str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
    return [wheel.name for wheel in missing]


def distribution_of(wheel: Path) -> str:
    """Return the project's name, with which the wheel's file name begins."""
    return re.sub(r"_", "-", wheel.name.partition("-")[0])


def is_installed(name: str) -> bool:
    """Return True if any version of the package is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
