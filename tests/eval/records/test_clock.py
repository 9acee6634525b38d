"""Wall time, and CPU time of a process and its children."""

from __future__ import annotations

import subprocess
import sys
import time

from adacc_hf.eval.records.clock import CLOCKS

BUSY = "import time\nwhile time.process_time() < 0.2: pass"


def test_cpu_time_does_not_pass_while_sleeping() -> None:
    starts = {name: now() for name, now in CLOCKS.items()}
    time.sleep(0.3)
    passed = {name: now() - starts[name] for name, now in CLOCKS.items()}
    assert passed["wall"] >= 0.3
    # Other threads of the test process may work in the meantime. In an idle process the time is below 1 ms.
    assert passed["cpu"] < 0.2


def test_cpu_time_counts_finished_children() -> None:
    start = CLOCKS["cpu"]()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert CLOCKS["cpu"]() - start >= 0.2
