"""Memory of the host: which devices have their own, and how much is free for one rank."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from adacc_hf.torch_glue import host_memory
from adacc_hf.torch_glue.host_memory import free_host_bytes, has_own_memory


@pytest.mark.parametrize(
    ("name", "is_integrated", "is_separate"),
    [("NVIDIA H100 80GB HBM3", 0, True), ("Orin", 1, False), ("NVIDIA GB10", 0, False), ("NVIDIA GB200", 0, True)],
)
def test_a_gpu_that_shares_the_hosts_memory_has_none_of_its_own(monkeypatch, name, is_integrated, is_separate):
    properties = SimpleNamespace(name=name, is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert has_own_memory(torch.device("cuda", 0)) == is_separate


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_other_devices_have_none(device):
    assert not has_own_memory(torch.device(device))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(available, files)`: a machine with `available` bytes, and files of its container's limits."""

    def make(available, files):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    return make


SECOND = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 600\ninactive_file 50\n"}
FIRST = {
    "memory/memory.limit_in_bytes": "800",
    "memory/memory.usage_in_bytes": "100",
    "memory/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("available", "files", "expected"),
    [
        (5000, {}, 5000),
        (5000, SECOND, 1000 - (700 - 50)),
        (200, SECOND, 200),
        (5000, SECOND | {"memory.max": "max\n"}, 5000),
        (5000, FIRST, 700),
        (5000, SECOND | {"memory.current": "2000\n"}, 0),
    ],
)
def test_the_limit_of_a_container_counts(machine, available, files, expected):
    machine(available, files)
    assert free_host_bytes() == expected


def test_ranks_of_one_host_share_its_memory(machine, monkeypatch):
    machine(5000, {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_host_bytes() == 625


def test_without_a_launcher_all_ranks_are_on_this_host(machine, monkeypatch):
    machine(5000, {})
    monkeypatch.setattr(host_memory, "num_ranks", lambda: 4)
    assert free_host_bytes() == 1250


def test_this_machine_has_free_memory():
    assert free_host_bytes() > 0
