"""Measured bytes against predicted bytes, and the memory meter."""

import gc
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from adacc_hf import AdaccConfig, apply_policy, profile_model
from adacc_hf.solve.simple_policies import random_policy, uniform_policy
from adacc_hf.torch_glue import memory
from adacc_hf.torch_glue.compat import switch_checkpointing
from adacc_hf.torch_glue.memory import (
    allocate_workspaces,
    allocated_bytes,
    available_bytes,
    count_static_bytes,
    distinct_bytes,
    forward_loss,
    free_host_bytes,
    garbage_collection_disabled,
    has_own_memory,
    measure_step,
    total_host_bytes,
)
from adacc_hf.torch_glue.meters import MemoryMeter

CPU = torch.device("cpu")
ACTIONS = ("retain", "recompute", "compress")
SETTINGS = [
    pytest.param(("sdpa", None), id="sdpa-fp32"),
    pytest.param(("sdpa", torch.bfloat16), id="sdpa-bf16"),
    pytest.param(("eager", None), id="eager-fp32"),
    pytest.param(("eager", torch.bfloat16), id="eager-bf16"),
]


@pytest.fixture(scope="module", params=SETTINGS)
def profile_and_measure(request, tiny_gpt2, token_batch):
    """(profile, function that measures a step under a policy, or plainly)."""
    attention, dtype = request.param
    model, batch = tiny_gpt2(attention, layers=3), token_batch()
    autocast = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    with autocast:
        profile = profile_model(model, batch, AdaccConfig(min_compress_bytes=0))

    def measure(policy=None):
        with autocast:
            if policy is None:
                measure_step(model, batch)  # the first step may fill torch's caches
                return measure_step(model, batch)
            with apply_policy(model, policy):
                for _ in range(2):  # recorded, then with the learned order of backward
                    forward_loss(model, batch).backward()
                model.zero_grad(set_to_none=True)
                return measure_step(model, batch)

    return profile, measure


@pytest.mark.parametrize("actions", [("retain", "recompute"), ACTIONS, ("compress",)], ids="+".join)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_prediction_is_what_is_measured(profile_and_measure, peak_of, actions, seed):
    profile, measure = profile_and_measure
    policy = random_policy(profile, seed, actions)
    step = measure(policy)
    assert step.stored_bytes == policy.predicted_stored_bytes
    assert step.peak_bytes == peak_of(policy)


def test_retaining_everything_is_plain_training(profile_and_measure):
    profile, measure = profile_and_measure
    policy = uniform_policy(profile, "retain")
    plain = measure()
    step = measure(policy)
    assert plain.stored_bytes == step.stored_bytes == profile.plain_stored_bytes == policy.predicted_stored_bytes
    assert plain.peak_bytes == step.peak_bytes


def test_recomputation_peaks_no_higher_than_torchs_checkpoint(tiny_gpt2, token_batch, peak_of):
    model, batch = tiny_gpt2(layers=6, width=256, n_head=4, n_positions=256), token_batch(8, 256)
    policy = uniform_policy(profile_model(model, batch), "recompute")
    with apply_policy(model, policy):
        for _ in range(2):
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
        ours = measure_step(model, batch)
    switch_checkpointing(model, on=True, torch_options={"use_reentrant": False})
    theirs = measure_step(model, batch)
    switch_checkpointing(model, on=False)
    # Three dropouts of a block have a generator state each; checkpoint has one for the block.
    assert ours.peak_bytes <= theirs.peak_bytes + 2 * torch.get_rng_state().nbytes
    assert ours.peak_bytes == peak_of(policy)


def test_storages_are_counted_once():
    storage = torch.zeros(10)
    assert distinct_bytes([storage, storage[2:], storage.view(2, 5).t(), torch.zeros(3)]) == 52


@pytest.mark.filterwarnings("ignore")  # torchao warns of its versions
def test_a_quantized_weight_takes_what_its_codes_and_scales_take():
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    codes, *scales = (part for part in vars(layer[0].weight).values() if isinstance(part, torch.Tensor))
    assert codes.nbytes == 64 * 64
    assert count_static_bytes(layer, {}) == codes.nbytes + sum(scale.nbytes for scale in scales)


def test_static_bytes_have_everything_that_lives_between_steps():
    model = nn.Linear(4, 4, bias=False)
    model.tied = model.weight
    model.register_buffer("buffer", torch.zeros(5))
    batch = {"x": torch.zeros(2, 4), "rest": (torch.zeros(3), 1)}
    optimizer = torch.optim.Adam(model.parameters())
    assert count_static_bytes(model, batch, optimizer) == 64 + 20 + 32 + 12
    model(batch["x"]).sum().backward()
    optimizer.step()
    assert (
        count_static_bytes(model, batch, optimizer) == 3 * 64 + 64 + 20 + 32 + 12 + 4
    )  # two moments, the step's count
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].to("meta")
    assert count_static_bytes(model, batch, optimizer) == 2 * 64 + 64 + 20 + 32 + 12 + 4  # not counted elsewhere


def test_what_else_is_on_a_gpu_is_live_too(monkeypatch, tiny_gpt2, token_batch):
    """Other tensors on a GPU, such as a second model, count as static bytes. Existing gradients do not."""
    model, batch = tiny_gpt2(), token_batch()
    alone = profile_model(model, batch)
    model(**batch).loss.backward()
    gradient_bytes = distinct_bytes(parameter.grad for parameter in model.parameters())
    besides = 10_000_000
    allocated = count_static_bytes(model, batch) + besides
    monkeypatch.setattr("adacc_hf.torch_glue.memory.allocated_bytes", lambda device: allocated)
    beside_it = profile_model(model, batch)
    assert beside_it.static_bytes == allocated - gradient_bytes == alone.static_bytes + besides
    assert beside_it.loss_peak_bytes == alone.loss_peak_bytes + besides
    assert measure_step(model, batch).static_bytes == allocated


def test_workspaces_are_taken_for_a_profile_and_not_for_every_count(monkeypatch):
    devices = []
    ones = torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *size, device, **options: devices.append(device) or ones(*size, **options)
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * len(devices))
    gpu = torch.device("cuda", 0)
    assert allocated_bytes(gpu) == 0
    assert not devices
    allocate_workspaces(gpu)
    assert allocated_bytes(gpu) == 10
    assert devices == [gpu]
    allocate_workspaces(CPU)
    assert allocated_bytes(CPU) == 0
    assert devices == [gpu]


@pytest.mark.parametrize(("share", "nbytes"), [(1.0, 1300), (0.13, 1300), (0.1, 1000)])
@pytest.mark.parametrize(
    ("backend", "is_expandable", "usable_share"),
    [("native", True, 1), ("native", False, 0.9), ("cudaMallocAsync", False, 1)],
)
def test_a_gpu_has_what_is_free_and_ours_within_its_share_but_for_fragments(
    monkeypatch, share, nbytes, backend, is_expandable, usable_share
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": is_expandable}])
    assert available_bytes(torch.device("cuda", 0), static_bytes=7) == pytest.approx(nbytes * usable_share, abs=1)


def test_a_cpu_has_what_is_free_and_what_is_live(monkeypatch):
    monkeypatch.setattr("adacc_hf.torch_glue.memory.free_host_bytes", lambda: 100)  # limits of containers included
    assert available_bytes(CPU, static_bytes=7) == 82


def test_a_measured_step_leaves_gradients_as_they_were(tiny_gpt2, token_batch):
    model, batch = tiny_gpt2(), token_batch()
    model(**batch).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in gradients]
    step = measure_step(model, batch)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert step.static_bytes == count_static_bytes(model, batch)
    assert step.peak_bytes >= step.static_bytes + step.stored_bytes > step.static_bytes
    changed_gradients = [g for g, c in zip(gradients, copies, strict=True) if not torch.equal(g, c)]
    assert not changed_gradients


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(was_enabled):
    """Garbage collection is off inside the context, and a cycle that holds a tensor stays live."""
    (gc.enable if was_enabled else gc.disable)()
    try:
        with garbage_collection_disabled(), MemoryMeter.for_device(CPU) as meter:
            cycle = [torch.ones(1000)]
            cycle.append(cycle)
            del cycle
            cycles = [[] for _ in range(10 * gc.get_threshold()[0])]
            meter.mark(("end",))
        assert cycles
        assert meter.points[-1].live_bytes == 4000
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


# Memory of the host: which devices have their own, and how much is free for one rank.


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
    """`machine(available, files, own="")`: a machine with `available` bytes, files of its cgroups by path, and the text
    `own` about the process's cgroups."""

    def make(available, files, own=""):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=9000))
        monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
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
