"""Memory meter between torch's allocator and the C library, see `memory_meter/memory_meter.py`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's LD_PRELOAD"),
    pytest.mark.skipif(not (os.environ.get("CXX") or shutil.which("g++")), reason="needs a C++ compiler"),
]

BEGIN = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
from memory_meter import MemoryMeter
import torch
meter = MemoryMeter()
torch.ones(8) + 1
start = meter.live_bytes
"""

STORAGES = """
from multiprocessing.pool import ThreadPool
generator = torch.Generator().manual_seed(0)
drawn = lambda most: int(torch.randint(1, most, (), generator=generator))
def storages():
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in kept}.values())
kept, matches = [], []
for _ in range(300):
    kind = drawn(6)
    if kind == 1 and kept:
        del kept[drawn(len(kept) + 1) - 1]
    elif kind == 2 and kept:
        kept.append(kept[drawn(len(kept) + 1) - 1].view(-1)[:1])
    elif kind == 3 and kept:
        kept[-1].resize_(drawn(5000))
    else:
        dtype = (torch.float32, torch.float64, torch.int8)[drawn(4) - 1]
        kept.append(torch.empty(drawn(20000), dtype=dtype))
    matches.append(meter.live_bytes - start == storages())
size = 10 ** 4
others = ThreadPool(4).map(lambda _: [torch.zeros(size) for _ in range(50)][0], range(8))  # freed in other threads
torch.zeros(1)
kept += others
del others
print(json.dumps([all(matches), meter.live_bytes - start - storages()]))
"""


REFUSALS = """
x = torch.zeros(10 ** 6)
meter.limit(meter.live_bytes + 4 * 10 ** 6)
outcomes = []
for size in (10 ** 6, 10 ** 6 + 1, 10 ** 6):
    try:
        torch.zeros(size)
        outcomes.append("allocated")
    except RuntimeError as error:
        outcomes.append(str(error))
peak, refused = meter.peak_bytes - start, meter.num_refusals
meter.limit(None)
torch.zeros(10 ** 7)
print(json.dumps([outcomes, peak, refused]))
"""

STEP = """
from transformers import GPT2Config, GPT2LMHeadModel
from adacc_hf.torch_glue.memory import measure_step
torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=97))
ids = torch.randint(0, 97, (4, 64))
batch = {"input_ids": ids, "labels": ids}
model(**batch).loss.backward()
model.zero_grad()
start = meter.live_bytes
step = measure_step(model, batch)
meter.reset_peak()
loss = model(**batch).loss
loss.backward()
print(json.dumps([step.peak_bytes - step.static_bytes, meter.peak_bytes - start]))
"""


def run(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `BEGIN` and `script` in a metered process."""
    path = folder / "script.py"
    path.write_text(BEGIN + script)
    command = [sys.executable, ROOT / "tests/memory_meter", *options, path, ROOT / "tests/memory_meter"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def result(folder: Path, script: str) -> list:
    process = run(folder, script)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_it_counts_what_live_storages_hold(tmp_path: Path) -> None:
    """After each of 300 allocations, frees, views and resizes, and with tensors that other threads free."""
    always, difference = result(tmp_path, STORAGES)
    assert always
    assert difference == 0


def test_it_refuses_above_a_limit_as_torch_does(tmp_path: Path) -> None:
    outcomes, peak, refused = result(tmp_path, REFUSALS)
    assert outcomes[0] == outcomes[2] == "allocated"
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000004 bytes" in outcomes[1]
    assert (peak, refused) == (8 * 10**6, 1)


def test_a_limit_from_the_command_line(tmp_path: Path) -> None:
    process = run(tmp_path, "torch.zeros(10 ** 6)", "--limit", "3MiB")
    assert process.returncode == 1
    assert "can't allocate memory: you tried to allocate 4000000 bytes" in process.stderr
    assert "1 refusals" in process.stderr
    assert run(tmp_path, "torch.zeros(10 ** 6)", "--limit", "4MiB").returncode == 0


def test_our_own_account_of_a_step_agrees(tmp_path: Path) -> None:
    ours, metered = result(tmp_path, STEP)
    assert ours == pytest.approx(metered, abs=512)
    assert ours > 10**6
