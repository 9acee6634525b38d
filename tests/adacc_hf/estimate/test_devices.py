"""The table of devices, and the measured rates of this machine's CPU."""

import pytest

from adacc_hf.estimate.devices import NAMES, find_device, measure_cpu


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cpu"])
def test_every_name_has_a_plausible_device(name):
    device = find_device(name)
    assert device.name == name
    assert device.source
    assert 16e9 <= device.memory_bytes <= 200e9
    assert 0.3e12 <= device.bandwidth_bytes <= 5e12
    # Matrix products of 16-bit floats are faster than those of float32, and slower than 2 PFLOP/s, a sparse rate.
    assert device.flops["float32"] < device.flops["float16"] < 2e15
    assert device.flops.get("bfloat16", device.flops["float16"]) == device.flops["float16"]
    assert 0 < device.attention_share <= 1
    assert 0 < device.unaligned_share <= 1
    assert device.trace == "cuda"
    assert 10e9 <= device.host_bandwidth_bytes <= 0.8 * 63e9


def test_a_v100_has_no_bfloat16():
    assert "bfloat16" not in find_device("v100").flops


def test_the_cpu_is_measured_once_by_its_times(monkeypatch):
    """A copy reads and writes 64 MiB, and a product of 1024 x 1024 matrices takes 2 * 1024^3 operations."""
    measured_ms = []

    def median_ms(run, device):
        run()
        measured_ms.append(device.type)
        return 4.0

    monkeypatch.setattr("adacc_hf.price.timing.median_ms", median_ms)
    measure_cpu.cache_clear()
    try:
        device = find_device("cpu")
        assert find_device("cpu") is device
    finally:
        measure_cpu.cache_clear()
    assert measured_ms == ["cpu"] * 4
    assert device.bandwidth_bytes == 2 * 64 * 2**20 / 4e-3
    assert device.flops == {"float32": 2 * 1024**3 / 4e-3, "bfloat16": 2 * 1024**3 / 4e-3}
    assert (device.launch_ms, device.trace) == (4.0, "cpu")
    assert device.memory_bytes > 2**28
