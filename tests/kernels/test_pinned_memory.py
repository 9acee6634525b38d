"""Pinned memory: freed with its last reference, absent in forked processes. tests/kernels/test_host_pool.py pins it."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adacc_hf.kernels._pinned_memory import PinnedMemory

FORK = """
import gc, mmap, os, sys
import torch
from adacc_hf.kernels._pinned_memory import PinnedMemory

def is_mapped(address):
    ranges = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

memory = PinnedMemory(1 << 20)
contents = torch.frombuffer(memory, dtype=torch.uint8)
address = contents.data_ptr()
assert is_mapped(address)
child = os.fork()
if child == 0:
    assert not is_mapped(address)
    others = [mmap.mmap(-1, 1 << 20) for _ in range(200)]  # one of them may take the same addresses
    del memory, contents
    gc.collect()
    for other in others:
        other[:4] = b"1234"
    sys.exit(0)  # runs the finalizers of the interpreter
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
contents.fill_(1)
del memory, contents
gc.collect()
assert not is_mapped(address)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the test reads the process's memory map on Linux")
def test_a_forked_process_does_not_inherit_the_memory() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_memory_is_freed_with_its_last_tensor() -> None:
    memory = PinnedMemory(1 << 16)
    view = torch.frombuffer(memory, dtype=torch.uint8)[10:20]
    del memory
    gc.collect()
    view.fill_(3)
    assert view.sum() == 30


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 70, 1 << 46])
def test_memory_that_cannot_be_allocated_is_an_error_that_names_the_setting(nbytes: int) -> None:
    if nbytes == 1 << 46 and os.uname().machine != "x86_64":
        pytest.skip("the size is within the address space of other machines")
    with pytest.raises(MemoryError, match=r"GiB of host memory .* cannot be allocated \(.*host_memory=None"):
        PinnedMemory(nbytes)
