"""A call of a block that torch's checkpoint runs, with some of its inputs held as a codec's payload until backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.policy import Place
from adacc_hf.kernels.codecs import Codec, Coder
from adacc_hf.torch_glue.compat import checkpointed
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
    """Run `fn(*args)` under torch's checkpoint. The inputs at the places of `codecs` are held as payloads.

    Each place has a codec, and the coder to use, which is the codec itself or, in a tracking step, one that measures.
    An input is held as it is if its codec does not support it or the call changed it. `kwargs` are those bound in `fn`.
    """
    given = {place: tensor for place in codecs if (tensor := _at(place, args, kwargs)) is not None}
    fitting = {place: tensor for place, tensor in given.items() if _can_encode(codecs[place][0], tensor)}
    if not fitting:
        return checkpointed(fn, *args, block=block)
    versions = {place: version_of(tensor) for place, tensor in fitting.items()}
    held = _Held(fn, args, kwargs)
    del fn, args, kwargs, given

    def hold() -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
        for place, tensor in fitting.items():
            if version_of(tensor) == versions[place]:
                held.encode(place, tensor, codecs[place][1])
        fitting.clear()
        return held.call

    return checkpointed(held.fn, *held.args, block=block, hold=hold)


class _Held:
    """A call to repeat in backward. Some of its arguments are encoded."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.args = args
        self._kwargs = kwargs
        self._decoders: dict[Place, Decode] = {}

    def encode(self, place: Place, tensor: torch.Tensor, coder: Coder) -> None:
        """Replace an argument by the payload that `coder` makes of it."""
        payload, requires_grad, device_type = coder.encode(tensor.detach()), tensor.requires_grad, tensor.device.type

        def decode() -> torch.Tensor:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                decoded = coder.decode(payload)
            return decoded.requires_grad_(requires_grad)

        self._decoders[place] = decode
        self.fn, self.args, self._kwargs = self._with({place: None})

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function to call and its arguments."""
        fn, args, _ = self._with({place: decode() for place, decode in self._decoders.items()})
        return fn, args

    def _with(self, arguments: Mapping[Place, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The call with other arguments at some places."""
        args, kwargs, fn = list(self.args), dict(self._kwargs), self.fn
        for (first,), argument in arguments.items():
            if isinstance(first, int):
                args[first] = argument
            else:
                kwargs[first] = argument
        if isinstance(fn, partial):
            fn = partial(fn.func, *fn.args, **kwargs)
        return fn, tuple(args), kwargs


def _at(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the plain tensor at `place`, a position or a name, among the arguments; None if there is none."""
    if len(place) != 1:
        return None
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    found = given.get(place[0])
    return found if isinstance(found, torch.Tensor) and is_plain(found) else None


def _can_encode(codec: Codec, tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills its storage in order and `codec` supports it."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return is_whole and codec.supports(tuple(tensor.shape), tensor.dtype)
