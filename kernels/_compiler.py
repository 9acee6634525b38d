"""Compiles the C++ of this package where it runs, once: libraries are kept in $XDG_CACHE_HOME/adacc_hf."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def build(source: Path, flags: Sequence[str], facts: Sequence[str] = ()) -> Path:
    """The path of the shared library of `source`, compiled unless it is there already.

    `facts` are what it depends on besides the source, the flags and the compiler. Raises FileNotFoundError without a
    compiler, CalledProcessError if it fails, and RuntimeError or OSError without a folder to keep the library in.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("neither g++ nor clang++ found; install one or set CXX")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    key = hashlib.sha256("\n".join([source.read_text(), *flags, version, *facts]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adacc_hf"
    target = folder / f"{source.stem.strip('_')}-{key}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            subprocess.run(
                [compiler, *flags, str(source), "-o", str(built)], check=True, capture_output=True, text=True
            )
            built.replace(target)  # atomic: several processes may compile at once
    return target
