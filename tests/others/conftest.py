"""Folder of the modules that the tests of this folder import."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
