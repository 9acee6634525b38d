"""Cost model of compiled graphs: time to encode, decode, replay and store values in the code that Inductor generates.

On a CPU, encoding is bound by arithmetic, whose time was measured in fused kernels. On a GPU, encoding is bound by
memory traffic, so the cost is the number of extra passes over the value. For each codec, the passes were counted in
Inductor's generated code, with encoding after and before a matrix product, an elementwise operator and a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from adacc_hf.artifacts.exact_recompute_rules import walk_back
from adacc_hf.compiler.functorch import hint, op_types
from adacc_hf.compiler.joint_graph import is_materialized, nbytes_of, readers, root_of
from adacc_hf.kernels.codecs import Codec
from adacc_hf.price.timing import TIMING_REPEATS, median_ms
from adacc_hf.torch_glue.private import no_dispatch, tree_map_only


@dataclass(frozen=True)
class _DeviceCosts:
    """Cost of encoding and decoding on one device type, without the time to read and write the encoded payloads."""

    encode_passes: float
    """Arithmetic work of encoding a value, as a number of ordinary elementwise operators. Decoding takes a quarter of
    this number."""
    is_memory_bound: bool
    """True if memory traffic bounds the time of encoding, so that reading a value again costs time."""
    compile_ms: float
    """Inductor's compile time in ms per encoded tensor. On a CPU, C++ kernels are compiled for each tensor. On a GPU,
    kernels are compiled once for all blocks, and the time is Inductor's search for operators to fuse."""
    launch_ms: float
    """Time in ms to launch the additional kernels, 5 us each: four kernels on a CPU, one on a GPU."""


_DEVICES = {
    "cpu": _DeviceCosts(encode_passes=8, is_memory_bound=False, compile_ms=600.0, launch_ms=0.02),
    "cuda": _DeviceCosts(encode_passes=0, is_memory_bound=True, compile_ms=50.0, launch_ms=0.005),
}
NUM_STEPS = 10_000  # of a training run, over which the compile time is spread
REDUCTION_RATIO = 4  # least input elements per result element of a reduction; operators in gated layers have fewer


def coding_ms(codec: Codec, node: fx.Node, payload_bytes: int, forward: frozenset[fx.Node]) -> tuple[float, float]:
    """Return the milliseconds to encode and to decode the value of `node`. `forward` contains the nodes that forward
    runs."""
    tensor = node.meta["val"]
    speed, device = device_speed(tensor.device), _DEVICES["cpu" if tensor.device.type == "cpu" else "cuda"]
    nbytes = nbytes_of(node)
    arithmetic_ms = device.encode_passes * speed.pointwise_ms(nbytes)
    # Fixed overhead per tensor. Without it, many small tensors would be encoded for hardly any gain. Packing bits takes
    # few operators and has no such overhead.
    fixed_ms = 0.0 if codec.lossless else device.launch_ms + device.compile_ms / NUM_STEPS
    # Codes that share a byte are computed by a separate kernel, which reads both halves of the value at a time.
    shares_bytes = payload_bytes < hint(tensor.numel())
    num_reads = 1 if device.is_memory_bound and (shares_bytes or not _is_encoding_fusible(node, forward)) else 0
    if device.is_memory_bound and tensor.dtype is torch.bool:  # Inductor writes the mask to memory before packing it
        num_reads = 2
    # A product reads its operands from memory, so the decoded value is written first. A CPU reads it from the cache.
    is_written = any(not op_types().is_fusible(user) for user in readers(node))
    written_bytes = (2 if device.is_memory_bound else 1) * nbytes if is_written else 0
    return (
        speed.moving_ms(payload_bytes + num_reads * _read_bytes(node)) + arithmetic_ms + fixed_ms,
        speed.moving_ms(payload_bytes + written_bytes) + arithmetic_ms / 4,
    )


def _read_bytes(node: fx.Node) -> int:
    """Return the bytes that a kernel reads to get the value of `node`."""
    inputs = [nbytes_of(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return nbytes_of(node) if is_materialized(node) or not inputs else min(nbytes_of(node), sum(inputs))


def _is_encoding_fusible(node: fx.Node, forward: frozenset[fx.Node]) -> bool:
    """Return True if encoding the value can be fused with a forward kernel that computes or reads the value."""
    if _is_normalized(node) or _is_reduced(node, forward):
        return False
    return any(op_types().is_fusible(neighbor) for neighbor in (node, *forward.intersection(readers(node))))


def _is_reduced(node: fx.Node, forward: frozenset[fx.Node]) -> bool:
    """Return True if a forward kernel reduces the value's rows, directly or after elementwise operators."""
    _, results = walk_back(
        [node], lambda n: forward.intersection(readers(n)) if n is node or op_types().is_fusible(n) else None
    )
    return any(_is_reduction_of(result, node) for result in results)


def _is_normalized(node: fx.Node) -> bool:
    """Return True if the value is computed elementwise from a reduction over its rows. An example is the output of a
    normalization layer."""
    _, sources = walk_back([node], lambda n: n.all_input_nodes if op_types().is_fusible(n) else None)
    return any(_is_reduction_of(source, node) for source in sources)


def _is_reduction_of(result: fx.Node, source: fx.Node) -> bool:
    """Return True if `result` has far fewer elements than `source`, and Inductor can fuse the operator of `result`."""
    num_results, num_sources = _num_node_elements(result), _num_node_elements(source)
    if num_results is None or num_sources is None:
        return False
    return op_types().is_fusible(result) and REDUCTION_RATIO * num_results <= num_sources


def _num_node_elements(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    tensor = value[0] if isinstance(value, (tuple, list)) and value else value
    return hint(tensor.numel()) if isinstance(tensor, torch.Tensor) else None


# Cost of replaying and storing values in a compiled graph: memory traffic for fused operators, timings for others.
#
# Inductor fuses pointwise operators and reductions with their neighbours. Replaying a fused operator costs only the
# traffic beyond its neighbours', except for expensive functions such as tanh. Storing a value costs a write in forward
# and a read in backward. Products and attention are never fused, so they are timed.

LARGE_BYTES = 64 * 2**20  # copied to measure bandwidth: more than the caches hold, as backward reads from memory
CACHED_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""Elements of the tensor on which functions are timed, by device type. The tensor occupies the whole device but stays
in the cache, so the measured time is that of the arithmetic."""

POINTWISE_FRACTION = {"cpu": 0.1, "cuda": 0.02}
"""Arithmetic time of an ordinary operator in a fused kernel, as a fraction of the time to move its input and result.

On a CPU, a kernel of six operators took no longer than a kernel of one. A GPU such as the H100 issues 70 thread
instructions in the time that its memory reads and writes one float32 number."""

aten = torch.ops.aten
FUNCTIONS = (
    aten.exp, aten.exp2, aten.expm1, aten.log, aten.log1p, aten.log2, aten.tanh, aten.sigmoid, aten.erf, aten.erfc,
    aten.sin, aten.cos,
)  # fmt: skip
"""Elementwise functions whose arithmetic takes longer than reading their input on a CPU."""

CPU_BOOL_MS = 5e-6
"""Time in ms per element to write a boolean mask. On a CPU, Inductor writes masks element by element: writing 2**20
elements takes 5 ms longer than packing the elements to bits."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured speed of a device, for the cost model of compiled graphs."""

    bytes_per_ms: float
    """Bytes per millisecond of a copy on the device, counting both reads and writes."""
    pointwise_fraction: float
    """Arithmetic time of an ordinary operator, as a fraction of the time of its memory traffic (see
    POINTWISE_FRACTION)."""

    def moving_ms(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_ms

    def pointwise_ms(self, nbytes: float) -> float:
        """Return the arithmetic time of an ordinary operator in a fused kernel, for a tensor of `nbytes`."""
        return self.pointwise_fraction * self.moving_ms(2 * nbytes)


@cache
def device_speed(device: torch.device) -> DeviceSpeed:
    """Measure the memory bandwidth of `device` by a copy. The result is cached."""
    with no_dispatch(), torch.no_grad():
        source = torch.zeros(LARGE_BYTES // 4, device=device)
        target = torch.empty_like(source)
        copy_ms = least_replay_ms(lambda: target.copy_(source), device)
    return DeviceSpeed(2 * LARGE_BYTES / copy_ms, POINTWISE_FRACTION["cpu" if device.type == "cpu" else "cuda"])


@cache
def function_ms(function: Any, device: torch.device) -> float:
    """Measure the time per element of a function in FUNCTIONS, minus the time that a negation takes. The result is
    cached."""
    with no_dispatch(), torch.no_grad():
        sample = torch.linspace(0.1, 2.0, CACHED_ELEMENTS[device.type], device=device)
        result = torch.empty_like(sample)
        own, ordinary = (
            least_replay_ms(partial(op, sample, out=result), device) for op in (function.out, torch.ops.aten.neg.out)
        )
    return max(own - ordinary, 0.0) / sample.numel()


def least_replay_ms(run: Callable[[], object], device: torch.device) -> float:
    """Time several runs of a compiled operator, and return the milliseconds of the fastest. Other load on the machine
    only makes runs slower."""
    return min(median_ms(run, device, repeats=1) for _ in range(TIMING_REPEATS))


def keep_ms(node: fx.Node) -> float:
    """Return the milliseconds to store a value: a write in forward and a read in backward. If a matrix product computes
    or reads the value, the write takes no additional time, because the value is written to memory anyway."""
    nbytes, device = nbytes_of(node), node.meta["val"].device
    is_written = node.op == "placeholder" or not op_types().is_fusible(root_of(node)) or is_materialized(node)
    mask_ms = 0.0
    if not is_written and device.type == "cpu" and node.meta["val"].dtype is torch.bool:
        mask_ms = CPU_BOOL_MS * hint(node.meta["val"].numel())
    return mask_ms + device_speed(device).moving_ms(nbytes * (1 if is_written else 2))


class OperatorTimes:
    """Replay times of a compiled graph's operators. Timings are cached by operator and arguments."""

    def __init__(self) -> None:
        self._timed: dict[Any, float] = {}

    def replay_ms(self, node: fx.Node) -> float:
        """Return the milliseconds that replaying `node` adds to backward."""
        parts = [node] if isinstance(node.meta.get("val"), torch.Tensor) else list(node.users)
        results = [part for part in parts if isinstance(part.meta.get("val"), torch.Tensor)]
        if not results:
            return 0.0
        device = results[0].meta["val"].device
        if not op_types().is_fusible(node) or op_types().is_compute_intensive(node):
            return self._timed_ms(node, device)
        return _fused_ms(node, results, device)

    def _timed_ms(self, node: fx.Node, device: torch.device) -> float:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: _ExampleTensor.of(read))
        key = (node.target, repr(args), repr(kwargs))
        if key not in self._timed:
            target: Any = node.target  # the target of every call_function node is callable
            with no_dispatch(), torch.no_grad():
                args, kwargs = tree_map_only(_ExampleTensor, _ExampleTensor.make, (args, kwargs))
                self._timed[key] = least_replay_ms(lambda: target(*args, **kwargs), device)
        return self._timed[key]


def _fused_ms(node: fx.Node, results: list[fx.Node], device: torch.device) -> float:
    """Return the milliseconds that an operator adds to the kernel into which Inductor fuses it."""
    speed, result_bytes = device_speed(device), nbytes_of(results[0])
    input_bytes = max(
        (nbytes_of(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)), default=0
    )
    ms = speed.pointwise_ms(max(input_bytes, result_bytes))
    if input_bytes > 4 * result_bytes:  # a reduction: a separate kernel reads the whole input first
        ms += speed.moving_ms(input_bytes)
    if any(is_materialized(result) for result in results):  # a product reads the result from memory
        ms += speed.moving_ms(2 * result_bytes)
    function = getattr(node.target, "overloadpacket", None)
    if function in FUNCTIONS:
        ms += function_ms(function, device) * hint(results[0].meta["val"].numel())
    return ms


@dataclass(frozen=True)
class _ExampleTensor:
    """Layout of a tensor argument of a graph's operator, from which a sample tensor is built to time the operator."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node) -> Any:
        """Return an example of the value of `node`. For a tensor, return an object that describes its layout; for a
        symbolic size, return an integer; for any other value, return None."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return hint(value)
        if not isinstance(value, torch.Tensor):
            return None
        return cls(_hinted_sizes(value.shape), _hinted_sizes(value.stride()), value.dtype, value.device)

    def make(self) -> torch.Tensor:
        # Fill the flat storage, because several elements of an expanded tensor share one address.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        flat = torch.zeros(max(extent, 0), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            generator = torch.Generator(self.device).manual_seed(0)  # leaves the model's random state unchanged
            flat.uniform_(-1.0, 1.0, generator=generator)
        return flat.as_strided(self.size, self.stride)


def _hinted_sizes(sizes: Any) -> tuple[int, ...]:
    """Return a graph tensor's sizes as integers. A symbolic size is replaced by its value in the traced example."""
    return tuple(hint(size) for size in sizes)
