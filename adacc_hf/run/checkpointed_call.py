"""A block's call under torch's checkpoint, with some of its inputs stored as compressed payloads until backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.policy import Place
from adacc_hf.kernels.codecs import Codec, Coder
from adacc_hf.torch_glue.compat import checkpoint_call
from adacc_hf.torch_glue.private import version_of
from adacc_hf.torch_glue.tensors import is_plain

Decode = Callable[[], torch.Tensor]


def run_checkpointed(
    block: nn.Module,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    codecs: Mapping[Place, tuple[Codec, Coder]],
    graph: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
) -> Any:
    """Run a block's call `fn(*args)` under torch's checkpoint, and store some of its inputs as payloads until backward.

    `codecs` contains (codec, coder) by the input's place among the arguments. The coder is the codec, or a wrapper that
    measures errors. An input is stored without encoding if the codec does not support it, or if the call changed it in
    place. If (traced graph, its inputs) is given, backward runs the graph instead of the block's Python code.
    """
    inputs = {place: tensor for place in codecs if (tensor := _argument_at(place, args, kwargs)) is not None}
    compressible = {  # tensors that fill their storage contiguously
        place: tensor
        for place, tensor in inputs.items()
        if tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and codecs[place][0].supports(tuple(tensor.shape), tensor.dtype)
    }
    if not compressible and graph is None:
        return checkpoint_call(fn, *args, block=block)
    versions = {place: version_of(tensor) for place, tensor in compressible.items()}
    repeatable_call = _RepeatableCall(fn, args, kwargs) if graph is None else _RepeatableCall(*graph, {})

    def hold() -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
        for place, tensor in compressible.items():
            if version_of(tensor) == versions[place]:
                repeatable_call.encode(tensor, codecs[place][1])
        compressible.clear()
        return repeatable_call.call

    return checkpoint_call(
        fn, *args, block=block, hold=hold, has_same_inputs=not compressible, repeats_code=graph is None
    )


class _RepeatableCall:
    """Call that torch's checkpoint repeats in backward, with some arguments stored as payloads."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fn = partial(fn.func, *fn.args) if isinstance(fn, partial) and kwargs else fn
        self._arguments: dict[int | str, Any] = dict(enumerate(args))
        self._arguments.update(kwargs)
        self._decoders: list[tuple[list[int | str], Decode]] = []

    def encode(self, tensor: torch.Tensor, coder: Coder) -> None:
        """Store the argument `tensor` as a payload."""
        places = [place for place, argument in self._arguments.items() if argument is tensor]
        if not places:  # the graph does not read it
            return
        payload, requires_grad, device_type = coder.encode(tensor.detach()), tensor.requires_grad, tensor.device.type

        def decode() -> torch.Tensor:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                decoded = coder.decode(payload)
            return decoded.requires_grad_(requires_grad)

        self._decoders.append((places, decode))
        self._arguments |= dict.fromkeys(places)

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Decode the payloads, and return (function, arguments) to run the call again."""
        arguments = dict(self._arguments)
        for places, decode in self._decoders:
            arguments |= dict.fromkeys(places, decode())
        kwargs = {name: argument for name, argument in arguments.items() if isinstance(name, str)}
        args = tuple(argument for place, argument in arguments.items() if isinstance(place, int))
        return partial(self._fn, **kwargs), args


def _argument_at(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the argument at `place` (a position or keyword) if it is a plain tensor, else None."""
    if len(place) != 1:
        return None
    arguments_by_place: dict[int | str, Any] = dict(enumerate(args))
    arguments_by_place.update(kwargs)
    argument = arguments_by_place.get(place[0])
    return argument if isinstance(argument, torch.Tensor) and is_plain(argument) else None
