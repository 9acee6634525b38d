"""Allocations and frees of threads other than the profiled one, in the CPU allocator's account."""

import subprocess
import sys
import threading

import torch

from adacc_hf.torch_glue.memory import CpuMemoryMeter


def in_another_thread(call):
    """Run `call` to its end in another thread."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def live_after_another_thread_frees():
    """Return a meter's live bytes before and after another thread frees 4000 bytes and allocates 40."""
    tensors = []
    with CpuMemoryMeter() as meter:
        tensors.append(torch.empty(1000))
        meter.mark(("held",))
        in_another_thread(tensors.clear)
        own = torch.empty(10)
        meter.mark(("freed",))
    del own
    return [point.live_bytes for point in meter.points[1:]]


def test_what_another_thread_frees_is_not_live():
    assert live_after_another_thread_frees() == [4000, 40]


def test_what_another_thread_takes_is_live():
    tensors = []

    def take():
        tensors.append(torch.empty(1000))

    with CpuMemoryMeter() as meter:
        in_another_thread(take)
        own = torch.empty(10)
        meter.mark(("taken",))
    assert meter.points[-1].live_bytes == 4040
    del own


FREE_WHAT_WAS_THERE = """
import os, sys, torch
from adacc_hf.torch_glue.memory import CpuMemoryMeter

before = torch.empty(1000)
with CpuMemoryMeter():
    del before
    print("the user's line", file=sys.stderr, flush=True)
    os.write(2, b"a library's line\\n")
"""


def test_blocks_that_were_there_before_are_freed_without_a_word():
    """Blocks that were allocated before are freed without a warning. torch warns once per process, so the test starts
    one."""
    run = subprocess.run([sys.executable, "-c", FREE_WHAT_WAS_THERE], capture_output=True, text=True, check=True)
    assert "of unknown size" not in run.stderr
    assert "the user's line\na library's line\n" in run.stderr
