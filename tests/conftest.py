"""What holds for all tests."""

import os
import tempfile
from pathlib import Path

from hypothesis import settings

# How long an example takes is the machine's affair, and no property of ours.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Set before any import of ours, and inherited by subprocesses: no test touches the user's database of profiles.
_folder = tempfile.TemporaryDirectory(prefix="adacc_hf-tests-")
os.environ["ADACC_HF_PROFILES"] = str(Path(_folder.name) / "profiles.sqlite3")


def pytest_unconfigure() -> None:
    _folder.cleanup()
