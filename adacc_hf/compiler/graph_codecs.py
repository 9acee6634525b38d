"""The codecs that a forward value may be handed over in, priced as operators of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache

import torch
from torch import fx

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import CodecOption
from adacc_hf.compiler.functorch import has_unknown_sizes, is_view, op_types
from adacc_hf.compiler.graph_cost import coding_ms
from adacc_hf.compiler.joint_graph import JointGraph, readers
from adacc_hf.compiler.rewrite import memory_order
from adacc_hf.kernels.codecs import MASK, Codec, codec_type, codecs_suiting, get_codec, precise_codec
from adacc_hf.price.codec_options import assumed_outliers, codecs_of_role, make_codec
from adacc_hf.price.precision import attention_bias
from adacc_hf.torch_glue.private import SOFTMAX, no_dispatch
from adacc_hf.torch_glue.tensors import relative_error

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
