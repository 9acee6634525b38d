"""Run Python with an emulated CUDA device and this checkout on its path, also in child processes.

python tests/emulated_cuda -m pytest -m gpu
python tests/emulated_cuda -m adacc_hf.cli eval throughput --device cuda
"""

import os
import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
paths = [str(folder), str(folder.parents[1]), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
