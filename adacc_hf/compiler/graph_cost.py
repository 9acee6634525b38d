"""What coding, replaying and storing take in the code that Inductor makes: other things on a CPU than on a GPU. And the
codecs that a value may be handed over in, at that price.

On a CPU it is arithmetic, measured in fused kernels. A GPU waits for memory, so what counts is how often a kernel goes
over the value once more; that was counted in the code that Inductor makes for one (for each codec, after and before a
product, an operator on elements, and a norm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import CodecOption
from adacc_hf.compiler.compress_pass import memory_order
from adacc_hf.compiler.functorch import has_unknown_sizes, hint, is_view, op_types
from adacc_hf.compiler.joint_graph import JointGraph, is_held, nbytes_of, readers, root_of
from adacc_hf.kernels.codecs import MASK, Codec, codec_type, codecs_suiting, get_codec, precise_codec
from adacc_hf.price.codec_selection import assumed_outliers, attention_bias, codecs_of_role, make_codec
from adacc_hf.price.timing import TIMING_REPEATS, median_ms
from adacc_hf.torch_glue.private import SOFTMAX, no_dispatch, tree_map_only
from adacc_hf.torch_glue.tensors import relative_error


@dataclass(frozen=True)
class _DeviceCosts:
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
    "cpu": _DeviceCosts(encode_passes=8, rereads=False, compile_ms=600.0, calls_ms=0.02),
    "cuda": _DeviceCosts(encode_passes=0, rereads=True, compile_ms=50.0, calls_ms=0.005),
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
    count, of_source = _num_elements(made), _num_elements(source)
    if count is None or of_source is None:
        return False
    return op_types().is_fusible(made) and REDUCED * count <= of_source


def _num_elements(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    tensor = value[0] if isinstance(value, (tuple, list)) and value else value
    return hint(tensor.numel()) if isinstance(tensor, torch.Tensor) else None


# What replaying and storing cost in a compiled graph: bytes moved where operators fuse, measurement where they do not.
#
# Inductor fuses pointwise operators and reductions into the kernels of their neighbours: replaying one costs little but
# what it reads and writes beyond what those do, unless it is a function such as tanh; storing a value costs writing it
# in forward and reading it in backward. Products and attention run by themselves in any case, and are timed.

LARGE_BYTES = 64 * 2**20
"""More than caches hold: what is stored is read again when much else was in between."""
CACHED_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""Elements that stay in the cache, so that arithmetic is timed and not memory; enough to fill the device."""

CHEAP = {"cpu": 0.1, "cuda": 0.02}
"""Arithmetic of an ordinary operator in a fused kernel, as a part of moving what it reads and makes. On a CPU a kernel
of six took no longer than one of one. A GPU such as the H100 issues 70 instructions of threads while its memory reads
and writes a number in float32."""

aten = torch.ops.aten
FUNCTIONS = (
    aten.exp, aten.exp2, aten.expm1, aten.log, aten.log1p, aten.log2, aten.tanh, aten.sigmoid, aten.erf, aten.erfc,
    aten.sin, aten.cos,
)  # fmt: skip
"""Take longer than moving what they read, on a CPU."""

CPU_BOOL_MS = 5e-6
"""Inductor writes a mask to memory element by element on a CPU: 2**20 of them take 5 ms more than packed to bits."""


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in which time."""

    bytes_per_ms: float
    """Bytes moved by a copy, reading and writing counted."""
    cheap: float
    """As CHEAP."""

    def moving_ms(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_ms

    def pointwise_ms(self, nbytes: float) -> float:
        """Arithmetic of an ordinary operator in a fused kernel, on a tensor of `nbytes`."""
        return self.cheap * self.moving_ms(2 * nbytes)


@cache
def device_speed(device: torch.device) -> DeviceSpeed:
    """The speed of `device`, measured once."""
    with no_dispatch(), torch.no_grad():
        source = torch.zeros(LARGE_BYTES // 4, device=device)
        target = torch.empty_like(source)
        copy_ms = least_replay_ms(lambda: target.copy_(source), device)
    return DeviceSpeed(2 * LARGE_BYTES / copy_ms, CHEAP["cpu" if device.type == "cpu" else "cuda"])


@cache
def function_ms(function: Any, device: torch.device) -> float:
    """Time per element of a function of FUNCTIONS beyond that of an ordinary operator, measured once."""
    with no_dispatch(), torch.no_grad():
        sample = torch.linspace(0.1, 2.0, CACHED_ELEMENTS[device.type], device=device)
        result = torch.empty_like(sample)
        own, ordinary = (
            least_replay_ms(partial(op, sample, out=result), device) for op in (function.out, torch.ops.aten.neg.out)
        )
    return max(own - ordinary, 0.0) / sample.numel()


def least_replay_ms(run: Callable[[], object], device: torch.device) -> float:
    """Least time of some runs: what else the machine does makes them slower only."""
    return min(median_ms(run, device, repeats=1) for _ in range(TIMING_REPEATS))


def keep_ms(node: fx.Node) -> float:
    """Time to write a value in forward and read it in backward; what a product makes or reads is written anyway."""
    nbytes, device = nbytes_of(node), node.meta["val"].device
    is_written = node.op == "placeholder" or not op_types().is_fusible(root_of(node)) or is_held(node)
    writing = 0.0
    if not is_written and device.type == "cpu" and node.meta["val"].dtype is torch.bool:
        writing = CPU_BOOL_MS * hint(node.meta["val"].numel())
    return writing + device_speed(device).moving_ms(nbytes * (1 if is_written else 2))


class OperatorTimes:
    """Prices operators, each signature once."""

    def __init__(self) -> None:
        self._timed: dict[Any, float] = {}

    def replay_ms(self, node: fx.Node) -> float:
        """Time that running `node` again in backward adds."""
        parts = [node] if isinstance(node.meta.get("val"), torch.Tensor) else list(node.users)
        results = [part for part in parts if isinstance(part.meta.get("val"), torch.Tensor)]
        if not results:
            return 0.0
        device = results[0].meta["val"].device
        if not op_types().is_fusible(node) or op_types().is_compute_intensive(node):
            return self._timed_ms(node, device)
        return _fused_ms(node, results, device)

    def _timed_ms(self, node: fx.Node, device: torch.device) -> float:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: _Example.of(read))
        key = (node.target, repr(args), repr(kwargs))
        if key not in self._timed:
            assert callable(node.target)  # as that of any operator
            self._timed[key] = _measure(node.target, args, kwargs, device)
        return self._timed[key]


def _fused_ms(node: fx.Node, results: list[fx.Node], device: torch.device) -> float:
    """Time that an operator adds to the kernel that it is fused into."""
    speed, made = device_speed(device), nbytes_of(results[0])
    read = max((nbytes_of(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)), default=0)
    ms = speed.pointwise_ms(max(read, made))
    if read > 4 * made:  # a kernel of its own reads all of its input before others can use the result
        ms += speed.moving_ms(read)
    if any(is_held(result) for result in results):  # a product reads it from memory
        ms += speed.moving_ms(2 * made)
    function = getattr(node.target, "overloadpacket", None)
    if function in FUNCTIONS:
        ms += function_ms(function, device) * hint(results[0].meta["val"].numel())
    return ms


@dataclass(frozen=True)
class _Example:
    """The layout of an argument, from which a tensor like it can be made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return hint(value)
        if not isinstance(value, torch.Tensor):
            return None
        return cls(_hinted(value.shape), _hinted(value.stride()), value.dtype, value.device)

    def make(self) -> torch.Tensor:
        # Filled flat: an expanded tensor has several elements in one place.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        flat = torch.zeros(max(extent, 0), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            generator = torch.Generator(self.device).manual_seed(0)  # the model's own draws must not move
            flat.uniform_(-1.0, 1.0, generator=generator)
        return flat.as_strided(self.size, self.stride)


def _hinted(sizes: Any) -> tuple[int, ...]:
    return tuple(hint(size) for size in sizes)


def _measure(target: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> float:
    with no_dispatch(), torch.no_grad():
        args, kwargs = tree_map_only(_Example, _Example.make, (args, kwargs))
        return least_replay_ms(lambda: target(*args, **kwargs), device)


# The codecs that a forward value may be handed over in, priced as operators of a compiled graph.

aten = torch.ops.aten
_MASKING = {aten.where, aten.mul, aten.div, aten.clone, torch.ops.prims.convert_element_type}
"""What leads from a softmax to the scores that attention multiplies by."""


def graph_codec_options(
    joint: JointGraph, value: int, config: AdaccConfig, degraded: Set[int], fine: Set[int]
) -> tuple[CodecOption, ...]:
    """The codecs for one value; for those in `degraded` lossless ones only, for casts of parameters none (rule R4).

    None either for what has as many elements as the data says: a codec's groups are laid out before that is known.
    Unless the settings name codecs, values in `fine` take the precise one, and on a GPU all others may.
    """
    node = joint.nodes[value]
    tensor = node.meta["val"]
    size = tuple(joint.kind.values[value].shape[d] for d in memory_order(tensor))
    record = joint.kind.values[value]
    if record.nbytes < config.min_compress_bytes or record.role == "parameter" or has_unknown_sizes(tensor):
        return ()
    # Outliers are separated along a dimension that is the same in every call.
    is_fixed = bool(size) and isinstance(size[-1], int)
    num_outliers = assumed_outliers(size[-1], config, config.compiled_outliers) if is_fixed else 0
    names = _names(joint, value, config)
    if config.codecs is None and any(not codec_type(name).lossless for name in names):
        if value in fine:
            names = [precise_codec()]
        elif tensor.device.type != "cpu":  # a kernel that passes over the value makes its codes, which share no bytes
            names = list(dict.fromkeys([*names, precise_codec()]))
    codecs = [make_codec(name, config, num_outliers) for name in names]
    codecs = [codec for codec in codecs if codec.lossless or value not in degraded]
    options = [_option(codec, node, size, joint.forward) for codec in codecs if codec.supports(size, tensor.dtype)]
    return tuple(option for option in options if config.max_error is None or option.error <= config.max_error)


def _names(joint: JointGraph, value: int, config: AdaccConfig) -> list[str]:
    node = joint.nodes[value]
    if node.meta["val"].dtype is torch.bool:
        return _traceable(codecs_suiting(MASK))
    if "compress" not in config.actions or not node.meta["val"].is_floating_point() or is_attention_bias(node):
        return []
    names = codecs_of_role(_role(node), config)
    return _traceable(names) if config.codecs is None else names


def _traceable(names: Sequence[str]) -> list[str]:
    """Those that may stand in a graph: nobody asked for the others."""
    return [name for name in names if codec_type(name).is_traceable()]


def _role(node: fx.Node) -> str:
    """The class of tensor (paper, section 3.2), as far as a graph of primitive operators shows it."""
    if node.op == "placeholder":
        return "input"
    if _is_softmax(node):
        return "softmax"
    products = [user for user in readers(node) if op_types().is_compute_intensive(user)]
    if any(user.target is aten.bmm.default or "attention" in str(user.target) for user in products):
        return "qkv"
    return "linear" if products else "other"


def is_attention_bias(node: fx.Node) -> bool:
    """Whether fused attention adds a value, or a view of it, to its scores: a mask, whose -inf no scale takes."""
    views = [user for user in node.users if is_view(user)]
    is_added = any(attention_bias(user.target, user.args, user.kwargs) is node for user in node.users)
    return is_added or any(map(is_attention_bias, views))


def _is_softmax(node: fx.Node) -> bool:
    """Whether a value is a softmax, which is exp / sum once it is decomposed, perhaps masked, scaled or cast."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is SOFTMAX:
        return True
    if packet is aten.div and getattr(getattr(node.args[0], "target", None), "overloadpacket", None) is aten.exp:
        return True
    if is_view(node):
        return _is_softmax(node.all_input_nodes[0])
    return packet in _MASKING and any(_is_softmax(read) for read in node.all_input_nodes if _are_alike(read, node))


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are tensors of the same shape."""
    left, right = one.meta.get("val"), other.meta.get("val")
    return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.shape == right.shape


def _option(codec: Codec, node: fx.Node, size: tuple[int, ...], forward: frozenset[fx.Node]) -> CodecOption:
    payload_bytes = codec.predicted_bytes(size, node.meta["val"].dtype)
    encode_ms, decode_ms = coding_ms(codec, node, payload_bytes, forward)
    return CodecOption(
        codec=codec.name,
        options=tuple(sorted(codec.options.items())),
        nbytes=payload_bytes,
        encode_ms=encode_ms,
        decode_ms=decode_ms,
        error=0.0 if codec.lossless else _typical_error(codec.name, codec.options.get("group_size")),
        lossless=codec.lossless,
    )


@cache
def _typical_error(name: str, group_size: int | None) -> float:
    """Round-trip error on normal noise, since a graph is partitioned before there is data; None for a codec without
    groups."""
    with no_dispatch():
        noise = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0), device="cpu")
        codec = get_codec(name, **({} if group_size is None else {"group_size": group_size}))
        return float(relative_error([noise], [codec.decode(codec.encode(noise))]))
