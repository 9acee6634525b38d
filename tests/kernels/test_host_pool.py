"""The pool of host memory: blocks never overlap, freed memory is used again, and streams are ordered."""

import gc
import threading
from collections.abc import Callable, Iterator
from multiprocessing import SimpleQueue, get_context
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adacc_hf.kernels import _host_pool
from adacc_hf.kernels._host_payloads import ALIGNMENT, aligned
from adacc_hf.kernels._host_pool import HostPool


class User:
    """An object that reserves memory."""


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool()
    made.reserve(made, 64 * ALIGNMENT)
    yield made
    made.release(made)


def check_contents(pool: HostPool, live: list) -> None:
    assert pool.live_bytes == sum(block.nbytes for _, block in live) <= pool.nbytes
    for tensors, block in live:
        assert all(map(torch.equal, tensors, pool.load(block, torch.device("cpu"))))


@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(
        st.one_of(st.lists(st.integers(0, 3 * ALIGNMENT), min_size=1, max_size=4), st.integers(0, 20)), max_size=60
    )
)
def test_blocks_keep_their_contents_until_they_are_deleted(operations: list) -> None:
    """Integers delete a live block, lists of sizes store tensors."""
    pool, live = HostPool(), []
    pool.reserve(pool, 16 * ALIGNMENT)
    for number, operation in enumerate(operations):
        if isinstance(operation, int):
            if live:
                live.pop(operation % len(live))
        else:
            tensors = [torch.full((size,), number % 251, dtype=torch.uint8) for size in operation]
            block = pool.store(tensors)
            live += [] if block is None else [(tensors, block)]
            assert live or block is not None or sum(map(aligned, operation)) > pool.nbytes
            del block
        check_contents(pool, live)
    live.clear()
    everything = pool.store([torch.zeros(pool.nbytes, dtype=torch.uint8)])
    assert everything is not None, "freed parts are merged to one"


def test_a_block_has_an_aligned_part_for_each_tensor(pool: HostPool) -> None:
    tensors = [torch.randn(3), torch.randn(5, dtype=torch.float64), torch.ones(7, dtype=torch.bool), torch.empty(0)]
    block = pool.store(tensors)
    assert block is not None
    assert [(t.dtype, t.shape) for t in block.tensors] == [(t.dtype, t.shape) for t in tensors]
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in block.tensors if t.numel())
    assert block.nbytes == 3 * ALIGNMENT


def test_reservations_of_several_users_add_up_and_are_never_reduced(pool: HostPool) -> None:
    first, second = User(), User()
    assert pool.nbytes == 64 * ALIGNMENT
    pool.reserve(first, 10)
    assert pool.nbytes == 65 * ALIGNMENT
    pool.reserve(second, ALIGNMENT)
    pool.reserve(second, 1)
    assert pool.nbytes == 66 * ALIGNMENT
    pool.release(pool)
    pool.release(first)
    del second
    gc.collect()
    pool.release(first)
    assert pool.nbytes == 0


def store_with(pool: HostPool, action: Callable[[], None]) -> None:
    """Call `action` while the pool stores a tensor."""

    class Tensor:
        device, dtype, nbytes = torch.device("cpu"), torch.float32, 4

        @property
        def shape(self) -> tuple[int, ...]:
            action()
            return (1,)

    with pytest.raises(TypeError, match="copy_"):
        pool.store([Tensor()])  # type: ignore[list-item]


def run_in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_a_reservation_belongs_to_a_model(pool: HostPool) -> None:
    user, model = User(), User()
    pool.reserve(user, 1, model)
    assert pool.reserved_for_others(model) == 64 * ALIGNMENT
    assert pool.reserved_for_others(user) == 65 * ALIGNMENT
    pool.release(user)


def test_memory_that_cannot_be_allocated_leaves_the_earlier_reservation(pool, monkeypatch):
    def fail(nbytes: int) -> None:
        raise MemoryError(f"{nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(_host_pool, "PinnedMemory", fail)
        with pytest.raises(MemoryError, match=f"{100 * ALIGNMENT} bytes"):
            pool.reserve(pool, 100 * ALIGNMENT)
    assert pool.reserved_for_others(None) == 64 * ALIGNMENT
    assert pool.store([torch.zeros(1)]) is not None


def test_a_forked_process_has_an_empty_pool_of_its_own(pool: HostPool) -> None:
    """Payloads of the parent process are not readable. The lock may be held by another thread during the fork."""
    block, results = pool.store([torch.ones(1)]), SimpleQueue()
    assert block is not None

    def work() -> None:
        results.put((pool.nbytes, pool.live_bytes))
        own = pool.store([torch.full((1,), 2.0)])
        results.put((pool.nbytes, pool.load(own, torch.device("cpu"))[0].item()))
        try:
            pool.load(block, torch.device("cpu"))
        except RuntimeError as error:
            results.put(str(error))

    process = get_context("fork").Process(target=work)
    store_with(pool, lambda: run_in_thread(process.start))
    process.join(60)
    assert process.exitcode == 0
    assert results.get() == (0, 0)
    assert results.get() == (64 * ALIGNMENT, 2.0)
    assert "cannot be read in a forked process" in results.get()
    assert pool.load(block, torch.device("cpu"))[0].item() == 1.0


def test_the_pool_does_not_grow_under_live_payloads(pool: HostPool) -> None:
    tensor = torch.arange(100)
    block = pool.store([tensor])
    pool.reserve(pool, 1000 * ALIGNMENT)
    assert pool.nbytes == 64 * ALIGNMENT
    assert block is not None
    assert torch.equal(pool.load(block, torch.device("cpu"))[0], tensor)
    del block
    pool.store([tensor])
    assert pool.nbytes == 1000 * ALIGNMENT


def test_payloads_outlive_the_last_reservation(pool: HostPool) -> None:
    tensor = torch.arange(100)
    block = pool.store([tensor])
    pool.release(pool)
    assert pool.nbytes == 0
    assert block is not None
    assert torch.equal(pool.load(block, torch.device("cpu"))[0], tensor)


def test_blocks_may_be_deleted_on_other_threads(pool: HostPool) -> None:
    blocks = [pool.store([torch.zeros(1)]) for _ in range(60)]
    threads = [threading.Thread(target=blocks.pop) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.live_bytes == 0


# Pinned memory and streams, with a substitute for the CUDA runtime.


class Runtime:
    """Substitute for the CUDA runtime's functions that pin memory."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Runtime:
    made = Runtime(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_memory_is_pinned_at_once_and_unpinned_when_it_is_freed(runtime: Runtime) -> None:
    pool = HostPool()
    pool.reserve(pool, 10 * ALIGNMENT)
    assert list(runtime.registered.values()) == [10 * ALIGNMENT]
    block = pool.store([torch.zeros(1)])
    assert block is not None
    assert block.is_pinned
    pool.release(pool)
    assert runtime.registered, "a payload is live"
    del block
    assert not runtime.registered


@pytest.mark.parametrize("runtime", [2], indirect=True)
def test_memory_that_cannot_be_pinned_is_pageable_with_a_warning(runtime, caplog, monkeypatch):
    """CUDA keeps the error of the failed call until the next kernel launch, which raises it."""
    launches = []

    def launch(*args: object, device: str) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", launch)
        pool = HostPool()
        pool.reserve(pool, 10 * ALIGNMENT)
    assert launches == ["cuda"]
    assert "cannot be pinned (CUDA error 2): the pool for payloads uses pageable memory" in caplog.text
    block = pool.store([torch.arange(3)])
    assert block is not None
    assert not block.is_pinned
    assert pool.load(block, torch.device("cpu"))[0].tolist() == [0, 1, 2]


def test_a_copy_on_another_stream_waits_for_the_copy_before(monkeypatch: pytest.MonkeyPatch, pool: HostPool) -> None:
    """The pool's order is observed on tensors of a device type that reports "cuda"."""

    class Stream:
        def __init__(self) -> None:
            self.waited_for: list[Stream] = []

        def wait_stream(self, other: "Stream") -> None:
            self.waited_for.append(other)

    current = [Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    on_device = SimpleNamespace(device=SimpleNamespace(type="cuda"), nbytes=4, dtype=torch.float32, shape=(1,))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking: self)
    monkeypatch.setattr(_host_pool.torch, "empty", lambda *args, **kwargs: torch.zeros(1))
    block = pool.store([on_device])
    pool.store([on_device])
    assert current[0].waited_for == []
    first, current[0] = current[0], Stream()
    assert block is not None
    pool.load(block, on_device.device)
    pool.load(block, on_device.device)
    assert current[0].waited_for == [first]


def test_a_copy_within_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch, pool: HostPool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_device = SimpleNamespace(device=SimpleNamespace(type="cuda"), nbytes=4)
    with pytest.raises(RuntimeError, match=r"within a CUDA graph: .*host_memory=None"):
        pool.store([on_device])
