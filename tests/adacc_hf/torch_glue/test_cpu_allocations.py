"""Allocations and frees of threads other than the profiled one, in the CPU allocator's account."""

import subprocess
import sys

ANOTHER_THREAD = """
import threading, torch
from adacc_hf.torch_glue.meters import CpuMemoryMeter

tensors, own = [torch.empty(1)], []
with CpuMemoryMeter() as meter:
    tensors.append(torch.empty(1000))
    for call in (lambda: None, tensors.clear, lambda: tensors.append(torch.empty(500))):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        own.append(torch.empty(10))
        meter.mark(("after the thread",))
print([point.live_bytes for point in meter.points[1:]])
"""


def test_what_another_thread_frees_is_not_live_and_what_it_takes_is():
    """A process of its own: what other tests have left, and another thread frees, would be subtracted here."""
    run = subprocess.run([sys.executable, "-c", ANOTHER_THREAD], capture_output=True, text=True, check=True)
    assert run.stdout == "[4040, 80, 2120]\n"


FREE_WHAT_WAS_THERE = """
import os, sys, torch
from adacc_hf.torch_glue.meters import CpuMemoryMeter

before = torch.empty(1000)
with CpuMemoryMeter():
    del before
    print("the user's line", file=sys.stderr, flush=True)
    os.write(2, b"a library's line\\n")
"""


def test_blocks_that_were_there_before_are_freed_without_a_word():
    """Blocks from before are freed without a warning, which torch gives once per process."""
    run = subprocess.run([sys.executable, "-c", FREE_WHAT_WAS_THERE], capture_output=True, text=True, check=True)
    assert "of unknown size" not in run.stderr
    assert "the user's line\na library's line\n" in run.stderr
