"""What coding takes in compiled graphs, in bytes moved."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from adacc_hf.ahead.fake_device import fake_tensors
from adacc_hf.kernels.codecs import get_codec
from adacc_hf.partitioner import coding_cost
from adacc_hf.partitioner.coding_cost import coding_ms
from adacc_hf.partitioner.fused_cost import CHEAP, DeviceSpeed

WIDTH = 256
SHAPE = (4, 128, WIDTH)
# Functions that make one value in two steps, so that it is known by its operator, and something of it.
FORWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "made by an operator on elements, read by a product": (lambda x, w: (x.relu() * 2) @ w, "mul"),
    "made by a product, read by an operator on elements": (lambda x, w: F.gelu(x @ w) @ w[:, :8], "mm"),
    "made by a product, read by a product": (lambda x, w: (x @ w) @ w, "mm"),
    "made by a norm, read by a product": (lambda x, w: F.rms_norm(x, (WIDTH,)) @ w, "mul"),
    "made by an operator on elements, read by a norm": (lambda x, w: F.rms_norm(x.relu() * 2, (WIDTH,)) @ w, "mul"),
}
# Times that a kernel reads the value to encode it, as counted in what Inductor makes for a GPU.
READS = {
    "made by an operator on elements, read by a product": {"outlier_int4": 1, "int8": 0},
    "made by a product, read by an operator on elements": {"outlier_int4": 1, "int8": 0},
    "made by a product, read by a product": {"outlier_int4": 1, "int8": 1},
    "made by a norm, read by a product": {"outlier_int4": 1, "int8": 1},
    "made by an operator on elements, read by a norm": {"outlier_int4": 1, "int8": 1},
}


def _value(function: Callable[..., Any], name: str, device: str) -> tuple[fx.Node, frozenset[fx.Node]]:
    """The first node of an operator in the function's graph, on tensors without memory, and all nodes."""
    with fake_tensors(device):
        inputs = torch.empty(SHAPE), torch.empty(WIDTH, WIDTH)
        graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs).graph
    (node, *_) = [node for node in graph.nodes if getattr(node.target, "_opname", "") == name]
    return node, frozenset(graph.nodes)


@pytest.fixture(autouse=True)
def a_byte_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_cost, "device_speed", lambda device: DeviceSpeed(1.0, CHEAP[device.type]))


@pytest.mark.parametrize("codec_name", ["outlier_int4", "int8"])
@pytest.mark.parametrize("case", FORWARDS)
def test_a_gpu_reads_a_value_once_more_unless_a_kernel_passes_over_it(case: str, codec_name: str) -> None:
    node, forward = _value(*FORWARDS[case], "cuda")
    codec = get_codec(codec_name)
    nbytes, payload_bytes = node.meta["val"].nbytes, codec.predicted_bytes(SHAPE, torch.float32)
    encode_ms, decode_ms = coding_ms(codec, node, payload_bytes, forward)
    # Starting and compiling kernels takes less than a byte's time here.
    assert encode_ms == pytest.approx(payload_bytes + READS[case][codec_name] * nbytes, abs=1)
    is_written = "read by a product" in case
    assert decode_ms == pytest.approx(payload_bytes + (2 * nbytes if is_written else 0), abs=1)


def test_a_cast_is_read_from_what_it_is_a_cast_of() -> None:
    def cast_twice(x: Tensor, w: Tensor) -> Tensor:
        return (x.bfloat16() @ w.bfloat16()).float().relu()

    node, forward = _value(cast_twice, "convert_element_type", "cuda")
    product_cast = list(node.graph.find_nodes(op="call_function", target=node.target))[-1]
    codec = get_codec("outlier_int4")
    payload_bytes = codec.predicted_bytes(SHAPE, torch.float32)
    encode_ms, _ = coding_ms(codec, product_cast, payload_bytes, forward)
    assert encode_ms == pytest.approx(payload_bytes + product_cast.meta["val"].nbytes / 2, abs=1)


def test_a_cpu_takes_arithmetic_whoever_reads_the_value() -> None:
    codec = get_codec("outlier_int4")
    payload_bytes = codec.predicted_bytes(SHAPE, torch.float32)
    values = [_value(*forward, "cpu") for forward in FORWARDS.values()]
    (encode_ms,) = {coding_ms(codec, node, payload_bytes, nodes)[0] for node, nodes in values}
    assert encode_ms > payload_bytes + values[0][0].meta["val"].nbytes
