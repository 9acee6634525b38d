"""A block's call under torch's checkpoint, with some of its inputs stored as compressed payloads until backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.policy import Place
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.kernels.codecs import Codec, Coder
from adacc_hf.tape.tiled_rows import in_tiles
from adacc_hf.torch_glue.private import version_of
from adacc_hf.torch_glue.second_run import SecondCall, checkpoint_call
from adacc_hf.torch_glue.tensors import is_plain


def run_checkpointed(
    block: nn.Module,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    codecs: Mapping[Place, tuple[Codec, Coder]],
    graph: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    tiling: Tiling | None = None,
) -> Any:
    """Run a block's call `fn(*args)` under torch's checkpoint, and store some of its inputs as payloads until backward.

    `codecs` contains (codec, coder) by the input's place among the arguments. The coder is the codec, or a wrapper that
    measures errors. An input is stored without encoding if the codec does not support it, or if the call changed it in
    place. If (traced graph, its inputs) is given, backward runs the graph instead of the block's Python code. Modules
    in `tiling` run in tiles.
    """
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    compressible = {
        place: arguments[place[0]]
        for place, (codec, _) in codecs.items()
        if len(place) == 1 and _is_compressible(arguments.get(place[0]), codec)
    }
    tiled = in_tiles(block, tiling, fn)
    if not compressible and graph is None:
        return checkpoint_call(block, tiled, *args)
    versions = {place: version_of(tensor) for place, tensor in compressible.items()}
    function = partial(fn.func, *fn.args) if isinstance(fn, partial) and kwargs else fn
    if graph is not None:
        function, arguments = graph[0], dict(enumerate(graph[1]))
    decoders: list[tuple[list[int | str], Callable[[], torch.Tensor]]] = []

    def second_call() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        decoded = dict(arguments)
        for places, decode in decoders:
            decoded |= dict.fromkeys(places, decode())
        keywords = {name: argument for name, argument in decoded.items() if isinstance(name, str)}
        positional = tuple(argument for place, argument in decoded.items() if isinstance(place, int))
        return in_tiles(block, tiling, partial(function, **keywords)), positional

    def hold() -> SecondCall:
        for place, tensor in compressible.items():
            places = [other for other, argument in arguments.items() if argument is tensor]
            if places and version_of(tensor) == versions[place]:  # else the graph does not read it, or it was changed
                decoders.append((places, _encode(tensor, codecs[place][1])))
                arguments.update(dict.fromkeys(places))
        compressible.clear()
        return second_call

    return checkpoint_call(block, tiled, *args, hold=hold, has_same_inputs=not compressible, repeats_code=graph is None)


def _is_compressible(argument: Any, codec: Codec) -> bool:
    """Return True if `argument` is a plain tensor that fills its storage contiguously, and that `codec` supports."""
    return (
        isinstance(argument, torch.Tensor)
        and is_plain(argument)
        and argument.is_contiguous()
        and argument.untyped_storage().nbytes() == argument.nbytes
        and codec.supports(tuple(argument.shape), argument.dtype)
    )


def _encode(tensor: torch.Tensor, coder: Coder) -> Callable[[], torch.Tensor]:
    """Encode `tensor`, and return a function that decodes it."""
    payload, requires_grad, device_type = coder.encode(tensor.detach()), tensor.requires_grad, tensor.device.type
    size, stride = tensor.shape, tensor.stride()  # any stride of a dimension of size 1 counts as contiguous

    def decode() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            decoded = coder.decode(payload).as_strided(size, stride)
        return decoded.requires_grad_(requires_grad)

    return decode
