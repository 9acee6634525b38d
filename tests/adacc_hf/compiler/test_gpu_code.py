"""Bytes moved by Inductor's GPU kernels to encode and decode, the basis of prices."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._inductor import inductor_prims
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from adacc_hf.estimate.fake_device import fake_tensors
from adacc_hf.kernels.codecs import get_codec

pytest.importorskip("triton", reason="Triton is not installed: Inductor makes no code for a GPU")
if torch.backends.cuda.is_built():
    pytest.skip("torch was built with CUDA, and asks for a real device", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

H100 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    warp_size=32, total_memory=80 * 2**30, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20, name="H100",
)  # fmt: skip


class Interface(device_interface.DeviceInterface):
    """The part of a device interface that kernel selection calls."""

    class Worker:
        @staticmethod
        def get_device_properties(_: Any = None) -> SimpleNamespace:
            return H100

    get_device_properties = Worker.get_device_properties

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_compute_capability(_: Any = None) -> int:
        return 90

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have Inductor find an H100, and a Triton that can compile for it."""
    device_interface.get_interface_for_device("cpu")  # afterwards, all existing interfaces are registered
    for name in ("cuda", "cuda:0"):
        monkeypatch.setitem(device_interface.device_interfaces, name, Interface)
    monkeypatch.setattr("torch._inductor.scheduler.has_triton", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", Interface.get_device_properties)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)
    yield
    triton.runtime.driver.set_active(None)  # read again on the next request, if a driver exists


def _moved(graph: fx.Graph) -> float:
    """Return the bytes that the kernels of `graph` read and write."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    lowering = GraphLowering(module, example_inputs=inputs)
    with fake_tensors("cuda"), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        lowering.run(*inputs)
        lowering.codegen()
        return lowering.count_bytes()[0]


@pytest.mark.parametrize("name", ["outlier_int4", "asymmetric_int4", "fp8", "int8"])
def test_encoding_moves_what_it_is_priced_at(name, coded_value, forward_graph):
    codec = get_codec(name)

    def encoded(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        value, result = coded_value.forward(x, w)
        return result, *codec.encode_traceable(value)

    plain = forward_graph(lambda x, w: coded_value.forward(x, w)[1], "cuda")
    nbytes = plain.find_nodes(op="placeholder")[0].meta["val"].nbytes
    payload_bytes = codec.predicted_bytes((8, 512, 1024), torch.bfloat16)
    is_read_again = name not in ("fp8", "int8") or not coded_value.is_passed_over
    added = _moved(forward_graph(encoded, "cuda")) - _moved(plain)
    # A separate kernel may write the peaks, and the coding kernel read them: 3 % of the value.
    assert added == pytest.approx(payload_bytes + nbytes * is_read_again, abs=0.07 * nbytes)


def test_packing_a_mask_moves_what_it_is_priced_at(forward_graph: Callable[..., fx.Graph]) -> None:
    """Packing a mask moves the bytes in its price: one write and one read of the mask, and no random numbers in
    memory."""

    def dropped(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        seed = inductor_prims.lookup_seed(inductor_prims.seeds(1, x.device), 0)
        mask = inductor_prims.random(x.shape, seed, "rand") > 0.1
        return mask, F.layer_norm(x * mask, (x.shape[-1],)) @ w

    def packed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        mask, result = dropped(x, w)
        return result, *get_codec("bitmask").encode_traceable(mask)

    dropped_graph = forward_graph(dropped, "cuda")
    nbytes = dropped_graph.find_nodes(op="output")[0].args[0][0].meta["val"].nbytes
    added = _moved(forward_graph(packed, "cuda")) - _moved(dropped_graph)
    assert added == pytest.approx(nbytes + nbytes // 8, abs=0.01 * nbytes)
