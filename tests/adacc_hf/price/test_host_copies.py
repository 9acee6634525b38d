"""Measured copies between a device and its host."""

import pytest
import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.price import host_copies
from adacc_hf.price.host_copies import free_bytes_for, measure_host_link, time_copies

CPU = torch.device("cpu")
MODEL = nn.Identity()


@pytest.fixture
def separate(monkeypatch):
    """A CPU that passes for a device with memory of its own, on a host with 100 MiB."""
    monkeypatch.setattr(host_copies, "has_own_memory", lambda device: True)
    monkeypatch.setattr(host_copies, "free_host_bytes", lambda: 100 << 20)
    monkeypatch.setattr(host_copies, "MEASURED_BYTES", 1 << 20)


def test_copies_are_timed_in_both_directions(separate):
    link = time_copies(CPU)
    assert link.to_host_bytes_per_ms > 0
    assert link.to_device_bytes_per_ms > 0
    assert link.copy_ms > 0
    assert link.limit_bytes is None
    assert host_pool.nbytes == 0, "the pool of the process is not used"


def test_nothing_is_measured_where_nothing_may_move(separate, monkeypatch):
    monkeypatch.setattr(host_copies, "time_copies", None)
    assert measure_host_link(CPU, AdaccConfig(), MODEL) == (None, 0)
    monkeypatch.setattr(host_copies, "has_own_memory", lambda device: False)
    assert measure_host_link(CPU, AdaccConfig(host_memory="1MiB"), MODEL) == (None, 0)


@pytest.mark.parametrize(
    ("setting", "warns"), [("1MiB", False), (0.8, False), (0.1, False), ("90MiB", True), (1 << 40, True)]
)
def test_a_size_above_the_free_memory_is_warned_about(separate, caplog, setting, warns):
    link, free_bytes = measure_host_link(CPU, AdaccConfig(host_memory=setting), MODEL)
    assert link is not None
    assert free_bytes == 100 << 20
    assert ("is above 80.00 MiB, 80 % of the host's free memory" in caplog.text) == warns


def test_the_pool_of_this_process_counts_as_free_except_for_other_models(separate):
    class User:
        pass

    user, other_user, other_model = User(), User(), nn.Identity()
    config = AdaccConfig(host_memory="1MiB")
    host_pool.reserve(user, 1 << 20, MODEL)
    assert measure_host_link(CPU, config, MODEL)[1] == 101 << 20
    assert measure_host_link(CPU, config, other_model)[1] == 100 << 20
    host_pool.reserve(other_user, 2 << 20, other_model)
    assert [free_bytes_for(model) >> 20 for model in (MODEL, other_model, nn.Identity())] == [101, 102, 100]
    host_pool.release(user)
    assert free_bytes_for(other_model) == 103 << 20, "the other reservation may use all of the pool"
    host_pool.release(other_user)


def test_a_reservation_that_is_not_allocated_yet_is_not_free(separate):
    class User:
        pass

    user = User()
    host_pool.reserve(user, 1 << 20, MODEL)
    block = host_pool.store([torch.zeros(1)])
    host_pool.reserve(user, 3 << 20, MODEL)  # the pool grows when no payload is live
    assert (host_pool.nbytes, free_bytes_for(MODEL), free_bytes_for(nn.Identity())) == (1 << 20, 101 << 20, 98 << 20)
    del block
    host_pool.release(user)
