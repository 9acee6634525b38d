"""The plan of a Trainer run: the device that is here."""

import pytest
from planned_run import local_device


@pytest.mark.parametrize(
    ("name", "device_name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA L4", "l4")],
)
def test_the_gpu_that_is_here_is_planned_for_with_its_own_memory(name, device_name, monkeypatch):
    pretend_gpu(name, monkeypatch)
    device = local_device()
    assert (device.name, device.memory_bytes) == (device_name, 12345)


def test_a_gpu_without_rates_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    pretend_gpu("NVIDIA L40S", monkeypatch)
    message = r"--device=auto: the table of devices has no NVIDIA L40S; choose the most similar device of h100"
    with pytest.raises(ValueError, match=message):
        local_device()


def pretend_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": name, "total_memory": 12345})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
