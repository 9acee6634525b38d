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
) -> Any:
    """Run a block's call `fn(*args)` under torch's checkpoint, and store some of its inputs as payloads until backward.

    `codecs` contains (codec, coder) for each of these inputs, by the input's place among the arguments. The coder is
    the codec itself or, in a tracking step, a wrapper that measures errors. An input is stored without encoding if the
    codec does not support it, or if the call changed it in place. `kwargs` are the keyword arguments bound in `fn`.
    """
    inputs = {place: tensor for place in codecs if (tensor := _argument_at(place, args, kwargs)) is not None}
    compressible = {place: tensor for place, tensor in inputs.items() if _can_encode(codecs[place][0], tensor)}
    if not compressible:
        return checkpoint_call(fn, *args, block=block)
    versions = {place: version_of(tensor) for place, tensor in compressible.items()}
    repeatable_call = _RepeatableCall(fn, args, kwargs)
    del fn, args, kwargs, inputs

    def hold() -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
        for place, tensor in compressible.items():
            if version_of(tensor) == versions[place]:
                repeatable_call.encode(place, tensor, codecs[place][1])
        compressible.clear()
        return repeatable_call.call

    return checkpoint_call(repeatable_call.fn, *repeatable_call.args, block=block, hold=hold)


class _RepeatableCall:
    """Call of a block that torch's checkpoint repeats in backward, with some arguments stored as payloads."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.args = args
        self._kwargs = kwargs
        self._decoders: dict[Place, Decode] = {}

    def encode(self, place: Place, tensor: torch.Tensor, coder: Coder) -> None:
        payload, requires_grad, device_type = coder.encode(tensor.detach()), tensor.requires_grad, tensor.device.type

        def decode() -> torch.Tensor:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                decoded = coder.decode(payload)
            return decoded.requires_grad_(requires_grad)

        self._decoders[place] = decode
        self.fn, self.args, self._kwargs = self._with({place: None})

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Decode the payloads, and return (function, arguments) to run the call again."""
        fn, args, _ = self._with({place: decode() for place, decode in self._decoders.items()})
        return fn, args

    def _with(self, arguments: Mapping[Place, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return (fn, args, kwargs) of this call. The arguments at the places in `arguments` are replaced by the values
        in `arguments`."""
        args, kwargs, fn = list(self.args), dict(self._kwargs), self.fn
        for (first,), argument in arguments.items():
            if isinstance(first, int):
                args[first] = argument
            else:
                kwargs[first] = argument
        if isinstance(fn, partial):
            fn = partial(fn.func, *fn.args, **kwargs)
        return fn, tuple(args), kwargs


def _argument_at(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the argument of a block's call at `place` (a position or keyword) if the argument is a plain tensor, else
    None."""
    if len(place) != 1:
        return None
    arguments_by_place: dict[int | str, Any] = dict(enumerate(args))
    arguments_by_place.update(kwargs)
    argument = arguments_by_place.get(place[0])
    return argument if isinstance(argument, torch.Tensor) and is_plain(argument) else None


def _can_encode(codec: Codec, tensor: torch.Tensor) -> bool:
    """Return True if `codec` supports the tensor, and the tensor fills its storage contiguously."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return is_whole and codec.supports(tuple(tensor.shape), tensor.dtype)
