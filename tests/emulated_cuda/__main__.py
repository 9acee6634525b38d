"""Runs Python with an emulated CUDA device, in the processes that it starts too.

python tests/emulated_cuda -m pytest -m gpu
python tests/emulated_cuda -m adacc_hf.cli eval throughput --device cuda
"""

import os
import sys
from pathlib import Path

folder = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
