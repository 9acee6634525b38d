"""The memory meters: live bytes, their maximum between marks, and what has no effect on them."""

import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.profiler import record_function

from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.estimate.fake_device import FakeMemoryMeter
from adacc_hf.torch_glue.meters import (
    AllocatorEvents,
    CpuMemoryMeter,
    MemoryMeter,
    all_threads_flag,
    refuse_unmeasurable,
)

CPU = torch.device("cpu")


def test_the_meter_counts_live_and_peak_bytes():
    with MemoryMeter.for_device(CPU) as meter:
        tensor = torch.empty(1000)
        meter.mark(("kept",))
        for _ in range(3):
            torch.empty(500)
        meter.mark(("after temporaries",))
        del tensor
        meter.mark(("end",))
    points = {point.label[0]: point for point in meter.points}
    assert [point.label[0] for point in meter.points] == ["start", "kept", "after temporaries", "end"]
    assert (points["start"].live_bytes, points["start"].max_bytes) == (0, 4000)
    assert (points["kept"].live_bytes, points["kept"].max_bytes) == (4000, 6000)
    assert points["after temporaries"].live_bytes == 4000
    assert (points["end"].live_bytes, points["end"].max_bytes) == (0, 0)
    assert meter.peak_bytes == 6000


@pytest.mark.parametrize("kind", [CpuMemoryMeter, FakeMemoryMeter])
def test_a_mark_made_while_a_tensor_dies_does_not_count_it(kind):
    with kind() as meter:
        long_lived, dying = torch.empty(100), torch.empty(1000)
        storage = dying.untyped_storage()
        weakref.finalize(storage, meter.mark, ("death",), storage.nbytes())
        del storage, dying
        torch.empty(20)
    death = meter.points[-1]
    assert (death.label, death.live_bytes, death.max_bytes) == (("death",), 400, 480)
    del long_lived


def test_marks_of_other_threads_keep_the_labels_in_place():
    """The profiler does not record other threads: gloo's threads set marks when they free tensors."""

    def mark_elsewhere(meter):
        thread = threading.Thread(target=meter.mark, args=(("elsewhere",),))
        thread.start()
        thread.join()

    with CpuMemoryMeter() as meter:
        meter.mark(("begin",))
        tensor = torch.empty(1000)
        mark_elsewhere(meter)
        meter.mark(("full",))
        del tensor
        meter.mark(("end",))
        mark_elsewhere(meter)  # no mark follows
    assert [point.label[0] for point in meter.points] == ["start", "begin", "elsewhere", "full", "end"]
    live = {point.label[0]: point.live_bytes for point in meter.points}
    assert live["elsewhere"] - live["begin"] == live["full"] - live["end"] == 4000


def test_no_session_records_a_function_that_the_next_session_sees_end(monkeypatch):
    """The profiler would write the function's end into the memory of the first session, which is freed."""
    sessions, read = [], AllocatorEvents.read
    monkeypatch.setattr(AllocatorEvents, "read", lambda e, s: sessions.append(s.kineto_results) or read(e, s))
    with CpuMemoryMeter(), record_function("FSDP.forward"):
        tensor = torch.ones(10) + 1
        with CpuMemoryMeter() as inner:
            inner.mark(("end",))
    assert len(sessions) == 3
    assert {node.name for session in sessions for node in session.experimental_event_tree()} == {"[memory]"}
    del tensor


def test_a_refused_allocation_does_not_count():
    with CpuMemoryMeter() as meter:
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(2**50, dtype=torch.uint8)
        kept = torch.ones(1000)
    assert meter.peak_bytes == kept.nbytes


@pytest.mark.parametrize("is_inner", [False, True])
def test_storages_from_before_a_meter_do_not_count(is_inner):
    """The profiler counts the free of a storage if an earlier meter has recorded one at the same address."""
    with CpuMemoryMeter():
        old = torch.empty(300)
    with CpuMemoryMeter() as meter:
        new = torch.empty(50)
        with CpuMemoryMeter() if is_inner else nullcontext():
            del old
            also_new = torch.empty(70)
        meter.mark(("end",))
        del also_new
        meter.mark(("after",))
    assert [point.live_bytes for point in meter.points] == [0, 480, 200]
    del new


def test_an_inner_meter_that_outlives_its_outer_one_has_no_result():
    outer, inner = CpuMemoryMeter().__enter__(), CpuMemoryMeter()
    inner.__enter__()
    outer.__exit__(None)
    with pytest.raises(ProfilerConflictError):
        inner.__exit__(None)
    with CpuMemoryMeter() as meter:
        kept = torch.empty(100)
    assert (meter.peak_bytes, all_threads_flag.value) == (kept.nbytes, False)


def test_a_model_on_a_device_without_a_meter_is_refused():
    refuse_unmeasurable(torch.nn.Linear(2, 2))
    refuse_unmeasurable(torch.nn.Identity())  # without parameters
    with pytest.raises(ValueError, match=r"memory on device meta cannot be measured.*use_cpu=True"):
        refuse_unmeasurable(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="memory on device meta cannot be measured: train on cpu or cuda"):
        MemoryMeter.for_device(torch.device("meta"))


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
    """Blocks that were allocated before are freed without a warning. torch warns once per process, so the test starts
    one."""
    run = subprocess.run([sys.executable, "-c", FREE_WHAT_WAS_THERE], capture_output=True, text=True, check=True)
    assert "of unknown size" not in run.stderr
    assert "the user's line\na library's line\n" in run.stderr
