"""Codecs for the forward values of a compiled graph, with their costs as operators of the graph."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache

import torch
from torch import fx

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import CodecOption
from adacc_hf.compiler.compress_pass import memory_order
from adacc_hf.compiler.functorch import has_unknown_sizes, is_view, op_types
from adacc_hf.compiler.graph_cost import coding_ms
from adacc_hf.compiler.joint_graph import JointGraph, readers
from adacc_hf.kernels.codecs import MASK, PRECISE, Codec, codec_type, codecs_suiting, get_codec
from adacc_hf.price.codec_selection import codecs_of_role
from adacc_hf.price.precision_sensitive import attention_bias
from adacc_hf.torch_glue.private import SOFTMAX, no_dispatch
from adacc_hf.torch_glue.tensors import relative_error

aten = torch.ops.aten
_MASKING = {aten.where, aten.mul, aten.div, aten.clone, torch.ops.prims.convert_element_type}
"""Operators that may come between a softmax and attention's product with the values: masking, scaling, casting."""


def graph_codec_options(
    joint: JointGraph, value: int, config: AdaccConfig, degraded: Set[int], fine: Set[int]
) -> tuple[CodecOption, ...]:
    """Return the codecs that may compress one value of a compiled graph, with their costs.

    Values in `degraded` get lossless codecs only. Casts of parameters get no codec, because they are recomputed from
    the parameters. Tensors with data-dependent sizes get no codec, because a codec's groups are laid out before these
    sizes are known. If the settings name no codecs, values in `fine` get only the precise codec (INT8), and on a GPU
    all other values may use INT8 in addition to coarser codecs.
    """
    node = joint.nodes[value]
    tensor = node.meta["val"]
    size = tuple(joint.kind.values[value].shape[d] for d in memory_order(tensor))
    record = joint.kind.values[value]
    if record.nbytes < config.min_compress_bytes or record.role == "parameter" or has_unknown_sizes(tensor):
        return ()
    names = _graph_codec_names(joint, value, config)
    if config.codecs is None and any(not codec_type(name).lossless for name in names):
        if value in fine:
            names = [PRECISE]
        elif tensor.device.type != "cpu":  # INT8 codes share no bytes, so encoding is fused on a GPU
            names = list(dict.fromkeys([*names, PRECISE]))
    codecs = [get_codec(name) for name in names]
    codecs = [codec for codec in codecs if codec.lossless or value not in degraded]
    options = [
        _graph_codec_option(codec, node, size, joint.forward) for codec in codecs if codec.supports(size, tensor.dtype)
    ]
    return tuple(option for option in options if config.max_error is None or option.error <= config.max_error)


def _graph_codec_names(joint: JointGraph, value: int, config: AdaccConfig) -> list[str]:
    node = joint.nodes[value]
    if node.meta["val"].dtype is torch.bool:
        return _traceable_codecs(codecs_suiting(MASK))
    if "compress" not in config.actions or not node.meta["val"].is_floating_point() or is_attention_bias(node):
        return []
    names = codecs_of_role(_role_of_node(node), config)
    return _traceable_codecs(names) if config.codecs is None else names


def _traceable_codecs(names: Sequence[str]) -> list[str]:
    return [name for name in names if codec_type(name).is_traceable()]


def _role_of_node(node: fx.Node) -> str:
    """Return the tensor's role (paper, section 3.2), such as "qkv", or "other" if the operators do not show it."""
    if node.op == "placeholder":
        return "input"
    if _is_softmax_node(node):
        return "softmax"
    products = [user for user in readers(node) if op_types().is_compute_intensive(user)]
    if any(user.target is aten.bmm.default or "attention" in str(user.target) for user in products):
        return "qkv"
    return "linear" if products else "other"


def is_attention_bias(node: fx.Node) -> bool:
    """Return True if the value is a bias that fused attention adds to the attention scores, directly or through a view.
    Such a bias is a mask that contains -inf, which no codec's scale can represent."""
    views = [user for user in node.users if is_view(user)]
    is_added = any(attention_bias(user.target, user.args, user.kwargs) is node for user in node.users)
    return is_added or any(map(is_attention_bias, views))


def _is_softmax_node(node: fx.Node) -> bool:
    """Return True if the value is a softmax, possibly computed as exp / sum, and possibly masked, scaled or cast."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is SOFTMAX:
        return True
    if packet is aten.div and getattr(getattr(node.args[0], "target", None), "overloadpacket", None) is aten.exp:
        return True
    if is_view(node):
        return _is_softmax_node(node.all_input_nodes[0])
    return packet in _MASKING and any(
        _is_softmax_node(read) for read in node.all_input_nodes if _have_same_shape(read, node)
    )


def _have_same_shape(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta.get("val"), second.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape


def _graph_codec_option(codec: Codec, node: fx.Node, size: tuple[int, ...], forward: frozenset[fx.Node]) -> CodecOption:
    payload_bytes = codec.predicted_bytes(size, node.meta["val"].dtype)
    encode_ms, decode_ms = coding_ms(codec, node, payload_bytes, forward)
    return CodecOption(
        codec=codec.name,
        options=tuple(sorted(codec.options.items())),
        nbytes=payload_bytes,
        encode_ms=encode_ms,
        decode_ms=decode_ms,
        error=0.0 if codec.lossless else _typical_error(codec.name),
        lossless=codec.lossless,
    )


@cache
def _typical_error(name: str) -> float:
    """Return the relative error that is assumed for a codec in a compiled graph."""
    with no_dispatch():
        noise = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0), device="cpu")
        codec = get_codec(name)
        return float(relative_error([noise], [codec.decode(codec.encode(noise))]))
