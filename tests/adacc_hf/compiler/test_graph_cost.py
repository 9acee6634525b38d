"""Costs of coding in compiled graphs, in bytes moved. test_gpu_code.py counts the bytes that Inductor's kernels
move."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, fx

from adacc_hf.compiler import graph_cost as coding_cost
from adacc_hf.compiler.graph_cost import POINTWISE_FRACTION, DeviceSpeed, coding_ms
from adacc_hf.compiler.joint_graph import root_of
from adacc_hf.kernels.codecs import get_codec


@pytest.fixture(autouse=True)
def a_byte_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a price of 1 ms per byte. Starting and compiling kernels takes less than one byte."""
    monkeypatch.setattr(coding_cost, "device_speed", lambda device: DeviceSpeed(1.0, POINTWISE_FRACTION[device.type]))


def _value(graph: fx.Graph) -> fx.Node:
    """Return the graph's first output, which is removed from the outputs."""
    output = graph.find_nodes(op="output")[0]
    value, result = output.args[0]
    output.args = (result,)
    return root_of(value)


def _coding(name: str, value: fx.Node, **options: Any) -> tuple[int, float, float]:
    """Return (bytes of the payload, other bytes moved in encoding, other bytes moved in decoding)."""
    codec, tensor = get_codec(name, **options), value.meta["val"]
    payload_bytes = codec.predicted_bytes(tuple(tensor.shape), tensor.dtype)
    times = coding_ms(codec, value, payload_bytes, frozenset(value.graph.nodes))
    return payload_bytes, *(ms - payload_bytes for ms in times)


@pytest.mark.parametrize("codec", ["outlier_int4", "int8"])
def test_a_gpu_reads_a_value_once_more_unless_a_kernel_passes_over_it(codec, coded_value, forward_graph):
    value = _value(forward_graph(coded_value.forward, "cuda"))
    _, encoding, decoding = _coding(codec, value)
    nbytes = value.meta["val"].nbytes
    is_read_again = codec == "outlier_int4" or not coded_value.is_passed_over  # two of its codes share a byte
    assert encoding == pytest.approx(nbytes if is_read_again else 0, abs=1)
    assert decoding == pytest.approx(2 * nbytes if coded_value.is_read_by_product else 0, abs=1)


def test_a_cast_is_read_from_what_it_is_a_cast_of(forward_graph: Callable[..., fx.Graph]) -> None:
    def cast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x @ w).float()
        return wide, wide.relu()

    value = _value(forward_graph(cast, "cuda"))
    assert _coding("outlier_int4", value)[1] == pytest.approx(value.meta["val"].nbytes / 2, abs=1)


def test_a_mask_is_written_and_read_before_it_is_packed(forward_graph: Callable[..., fx.Graph]) -> None:
    def masked(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        return mask, (x * mask) @ w

    value = _value(forward_graph(masked, "cuda"))
    assert _coding("bitmask", value)[1:] == pytest.approx((2 * value.meta["val"].nbytes, 0), abs=1)


def test_a_cpu_takes_arithmetic_whoever_reads_the_value(coded_value, forward_graph):
    value = _value(forward_graph(coded_value.forward, "cpu"))
    payload_bytes, encoding, _ = _coding("outlier_int4", value)
    assert encoding == pytest.approx(8 * 2 * POINTWISE_FRACTION["cpu"] * value.meta["val"].nbytes, abs=1)
    assert payload_bytes < value.meta["val"].nbytes / 3


# Codecs allowed for each value.
