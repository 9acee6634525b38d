"""Run a script with a meter of its CPU memory, and optionally a limit. The peak is printed at the end.

python tests/memory_meter script.py --its arguments
python tests/memory_meter --limit 20MiB script.py --its arguments
"""

import argparse
import atexit
import os
import runpy
import sys
from pathlib import Path

from memory_meter import MemoryMeter, environment

from adacc_hf.artifacts.units import parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/memory_meter", description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", metavar="SIZE", help="limit for torch's tensors, such as 20MiB")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    settings = environment()
    if os.environ.get("LD_PRELOAD") != settings["LD_PRELOAD"]:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
    del os.environ["LD_PRELOAD"]  # child processes of the script are not metered
    meter = MemoryMeter()
    meter.limit(None if options.limit is None else parse_bytes(options.limit, "--limit"))
    atexit.register(lambda: print(f"peak {meter.peak_bytes} bytes, {meter.num_refusals} refusals", file=sys.stderr))
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


main()
