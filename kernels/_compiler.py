"""Compilation of this package's C++ code. Libraries are built once per machine, in $XDG_CACHE_HOME/adacc_hf."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def build(source: Path, flags: Sequence[str], facts: Sequence[str] = ()) -> Path:
    """Return the path of the shared library for the C++ file `source`.

    If the library is not in the cache folder yet, compile the file.

    `facts` are further strings on which the library depends, such as the processor's name. Raise FileNotFoundError if
    no compiler is found, CalledProcessError if the compiler fails, and RuntimeError or OSError if the cache folder
    cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("neither g++ nor clang++ found: install one or set CXX")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    key = hashlib.sha256("\n".join([source.read_text(), *flags, version, *facts]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adacc_hf"
    target = folder / f"{source.stem.strip('_')}-{key}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            temporary_file = Path(scratch) / target.name
            subprocess.run(
                [compiler, *flags, str(source), "-o", str(temporary_file)], check=True, capture_output=True, text=True
            )
            temporary_file.replace(target)  # atomic: several processes may compile at once
    return target
