"""Memory of the host: which devices have their own, and how much is free for one rank."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from adacc_hf.torch_glue import host_memory
from adacc_hf.torch_glue.host_memory import free_host_bytes, has_own_memory, total_host_bytes


@pytest.mark.parametrize(
    ("name", "is_integrated", "is_separate"),
    [("NVIDIA H100 80GB HBM3", 0, True), ("Orin", 1, False), ("NVIDIA GB10", 0, False), ("NVIDIA GB200", 0, True)],
)
def test_a_gpu_that_shares_the_hosts_memory_has_none_of_its_own(monkeypatch, name, is_integrated, is_separate):
    properties = SimpleNamespace(name=name, is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert has_own_memory(torch.device("cuda", 0)) == is_separate


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(available, files, own="")`: a machine with `available` bytes, cgroup files, and its own cgroups."""

    def make(available, files, own=""):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=9000))
        monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if own:
            (tmp_path / "own").write_text(own)

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


def within(folder, files):
    """Return `files` of the root cgroup as files of the cgroup `folder`, below the same hierarchy."""
    return {
        f"memory/{folder}/{name.removeprefix('memory/')}" if name.startswith("memory/") else f"{folder}/{name}": text
        for name, text in files.items()
    }


JOB = "system.slice/slurm/job_7"


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        pytest.param(within(JOB, SECOND), f"0::/{JOB}\n", 350, id="own limit"),
        pytest.param(within(JOB, SECOND), f"0::/{JOB}/step_0/task_3\n", 350, id="limit of a parent"),
        pytest.param(within(JOB, SECOND), "0::/user.slice\n", 5000, id="limit of others"),
        pytest.param(within(JOB, SECOND), "", 5000, id="no own cgroup"),
        pytest.param(
            within(JOB, SECOND) | within("system.slice", SECOND | {"memory.max": "800\n"}),
            f"0::/{JOB}\n",
            150,
            id="least",
        ),
        pytest.param(SECOND | within(JOB, SECOND | {"memory.max": "max\n"}), f"0::/{JOB}\n", 350, id="unlimited child"),
        pytest.param(within("job", SECOND), "0::/../job\n", 350, id="other namespace"),
        pytest.param(SECOND, "0::/docker/ab12\n", 350, id="path of the machine"),
        pytest.param(within(JOB, FIRST), f"9:cpu,cpuacct:/x\n4:hugetlb,memory:/{JOB}\n0::/x\n", 700, id="version 1"),
        pytest.param(FIRST, "4:memory:/docker/ab12\n", 700, id="version 1, path of the machine"),
        pytest.param(within(JOB, FIRST), f"4:memory:/{JOB}/step_0\n", 700, id="version 1, parent"),
    ],
)
def test_limits_on_the_process_and_its_parents_count(machine, files, own, expected):
    machine(5000, files, own)
    assert free_host_bytes() == expected


@pytest.mark.parametrize(("files", "expected"), [({}, 9000), (SECOND, 1000), (FIRST, 800)], ids=["none", "2", "1"])
def test_a_plan_for_this_machine_counts_the_limit_of_a_container(machine, files, expected):
    machine(5000, files)
    assert total_host_bytes() == expected


def test_ranks_of_one_host_share_its_memory(machine, monkeypatch):
    machine(5000, {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_host_bytes() == 625
