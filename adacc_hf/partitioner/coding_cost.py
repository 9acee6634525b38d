"""What encoding and decoding a value take in the code that Inductor makes: other things on a CPU than on a GPU.

On a CPU it is arithmetic, measured in fused kernels. A GPU waits for memory, so what counts is how often a kernel goes
over the value once more; that was counted in the code that Inductor makes for one (for each codec, after and before a
product, an operator on elements, and a norm).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from adacc_hf.kernels.codecs import Codec
from adacc_hf.partitioner.functorch import hint, op_types
from adacc_hf.partitioner.fused_cost import device_speed
from adacc_hf.partitioner.joint_graph import is_held, nbytes_of, readers


@dataclass(frozen=True)
class _Device:
    """What coding takes there besides moving payloads."""

    encode_passes: float
    """Ordinary operators' worth of arithmetic that encoding takes; decoding takes a quarter of it."""
    rereads: bool
    """Whether it counts that a kernel goes over the value once more: arithmetic is hidden behind that."""
    compile_ms: float
    """Time that Inductor takes for what codes one more tensor: on a CPU, kernels in C++; a GPU's are compiled once for
    all blocks, and what is left is the choice of what to fuse."""
    calls_ms: float
    """Time to start the kernels beyond those of its neighbours, at 5 us each: four on a CPU, one on a GPU."""


_DEVICES = {
    "cpu": _Device(encode_passes=8, rereads=False, compile_ms=600.0, calls_ms=0.02),
    "cuda": _Device(encode_passes=0, rereads=True, compile_ms=50.0, calls_ms=0.005),
}
NUM_STEPS = 10_000
"""Steps over which compiling is spread: a training run's, as an order of magnitude."""
REDUCED = 4
"""Times as many elements as a result that what it is made of has, if a kernel reduces it: no ratio of a gated layer."""


def coding_ms(codec: Codec, node: fx.Node, payload_bytes: int, forward: frozenset[fx.Node]) -> tuple[float, float]:
    """Milliseconds for encoding and for decoding the value of `node`; `forward` has the nodes that forward runs."""
    tensor = node.meta["val"]
    speed, device = device_speed(tensor.device), _DEVICES["cpu" if tensor.device.type == "cpu" else "cuda"]
    nbytes = nbytes_of(node)
    arithmetic_ms = device.encode_passes * speed.pointwise_ms(nbytes)
    # The same for every size: without it, many small tensors would be coded for hardly any gain. Bits pack in few
    # operators.
    fixed_ms = 0.0 if codec.lossless else device.calls_ms + device.compile_ms / NUM_STEPS
    # Codes that share a byte are made by a kernel of its own, which reads both halves of the value at a time.
    shares_bytes = payload_bytes < hint(tensor.numel())
    num_reads = 1 if device.rereads and (shares_bytes or not _is_passed_over(node, forward)) else 0
    if codec.options.get("num_outliers"):  # known once all rows are summed up: the value is read for it, and then anew
        num_reads = 2
    if device.rereads and tensor.dtype is torch.bool:  # written to memory first, as a mask that is kept
        num_reads = 2
    # A product reads its operands from memory: what is decoded for it is written first, and read out of a CPU's cache.
    is_written = any(not op_types().is_fusible(user) for user in readers(node))
    written_bytes = (2 if device.rereads else 1) * nbytes if is_written else 0
    return (
        speed.moving_ms(payload_bytes + num_reads * _read_bytes(node)) + arithmetic_ms + fixed_ms,
        speed.moving_ms(payload_bytes + written_bytes) + arithmetic_ms / 4,
    )


def _read_bytes(node: fx.Node) -> int:
    """Bytes that a kernel reads for a value: what is in memory of it, or what it is made of on the way."""
    read = [nbytes_of(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return nbytes_of(node) if is_held(node) or not read else min(nbytes_of(node), sum(read))


def _is_passed_over(node: fx.Node, forward: frozenset[fx.Node]) -> bool:
    """Whether a kernel of forward goes over a value one group of elements after the other, and may encode it there.

    The one that makes it, or one that reads it, if they run for each element; one that reduces rows goes over rows.
    """
    if _is_normalized(node) or _is_reduced(node, forward):
        return False
    return any(op_types().is_fusible(near) for near in (node, *forward.intersection(readers(node))))


def _is_reduced(node: fx.Node, forward: frozenset[fx.Node]) -> bool:
    """Whether a kernel of forward that reads a value, or makes other elements of its elements, reduces its rows."""
    pending, seen = [node], {node}
    while pending:
        for user in forward.intersection(readers(pending.pop())) - seen:
            if _reduces(user, node):
                return True
            seen.add(user)
            if op_types().is_fusible(user):
                pending.append(user)
    return False


def _is_normalized(node: fx.Node) -> bool:
    """Whether a value is made, element by element, with what its rows were reduced to."""
    pending, seen = [node], {node}
    while pending:
        made = pending.pop()
        if not op_types().is_fusible(made):
            continue
        for read in made.all_input_nodes:
            if _reduces(read, node):
                return True
            if read not in seen:
                seen.add(read)
                pending.append(read)
    return False


def _reduces(made: fx.Node, source: fx.Node) -> bool:
    """Whether the first of two is far smaller than the second, and made in a kernel that reads what it is made of."""
    counts = [_num_elements(node) for node in (made, source)]
    return op_types().is_fusible(made) and None not in counts and REDUCED * counts[0] <= counts[1]


def _num_elements(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    tensor = value[0] if isinstance(value, (tuple, list)) and value else value
    return hint(tensor.numel()) if isinstance(tensor, torch.Tensor) else None
