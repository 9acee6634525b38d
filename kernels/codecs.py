"""The codec interface and the registry that finds codecs.

A codec turns a tensor into a smaller `Payload` and back. Each codec is one file of this folder, named after the codec,
holding one class decorated with `@register`; adding a codec means adding that file, which is imported when the codec
is first asked for. Files whose stem starts with an underscore or ends in `_triton` are helpers.
"""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

_PACKAGE = "adacc_hf.kernels"
_registry: dict[str, "type[Codec]"] = {}


F = TypeVar("F", bound=Callable[..., Any])


def without_gradients(function: F) -> F:
    """What torch.no_grad() makes of a function, in a tenth of its time where gradients are off already.

    They are whenever a block's tensors are stored and given back, some hundreds of times a step.
    """

    @wraps(function)
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        with torch.no_grad():
            return function(*arguments)

    return cast(F, run)


@dataclass(frozen=True, slots=True)
class Payload:
    """What `Codec.encode` returns: the tensors to keep, and the layout that `Codec.decode` restores."""

    tensors: tuple[Tensor, ...]
    """The bytes kept. Their storages are fresh and belong to this payload alone."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of `tensors`."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


class Codec:
    """Base class of all codecs. `encode` and `decode` never synchronise with the device; their shapes are static."""

    name: ClassVar[str]
    """The name in the registry, equal to the file's stem."""
    lossless: ClassVar[bool] = False
    """True if decode(encode(x)) is x bit for bit, for every x that `accepts` lets through."""

    @property
    def options(self) -> dict[str, Any]:
        """JSON-able options that rebuild this codec: `get_codec(codec.name, **codec.options)`."""
        return {name: getattr(self, name) for name in _option_names(type(self))}

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether tensors of this shape and dtype can be encoded at all. Looks at no data."""
        raise NotImplementedError

    def accepts(self, tensor: Tensor) -> bool:
        """Whether this very tensor may be encoded. May look at its data, so only for profiling time."""
        return self.supports(tuple(tensor.shape), tensor.dtype)

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exactly `encode(tensor).nbytes` for a tensor of this shape and dtype, padding and scales counted."""
        raise NotImplementedError

    def fit(self, tensor: Tensor) -> None:
        """Choose state that depends on the data, at tracking iterations only. Most codecs have none."""

    def encode(self, tensor: Tensor) -> Payload:
        """A payload from which `decode` restores `tensor`. Keeps no reference to `tensor` or its storage."""
        raise NotImplementedError

    def decode(self, payload: Payload) -> Tensor:
        """The tensor in fresh storage, with the dtype, size and stride of the one encoded."""
        raise NotImplementedError

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """What `encode` keeps of a contiguous tensor, by plain torch operators that may stand in a compiled graph.

        Static control flow and no in-place operator; bit-equal to `encode` right after `fit`. Raises
        NotImplementedError for a codec that needs other state than `fit` finds in the tensor.
        """
        raise NotImplementedError(f"codec {self!r} cannot stand in a compiled graph")

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor from what `encode_traceable` returned; bit-equal to `decode`."""
        raise NotImplementedError(f"codec {self!r} cannot stand in a compiled graph")

    def _require(self, tensor: Tensor) -> None:
        """Raise TypeError if `tensor` cannot be encoded."""
        if not self.supports(tuple(tensor.shape), tensor.dtype):
            raise TypeError(
                f"codec {self.name!r} with options {self.options} cannot take a tensor of shape {tuple(tensor.shape)} "
                f"and {tensor.dtype}; ask supports(shape, dtype) first"
            )

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({options})"


C = TypeVar("C", bound=type[Codec])


def register(codec_class: C) -> C:
    """Class decorator: make a codec known under its `name`."""
    _registry[codec_class.name] = codec_class
    return codec_class


@cache
def _codec_files() -> frozenset[str]:
    """The stems of the codecs' files, none of which is imported by that."""
    stems = {module.name for module in pkgutil.iter_modules(import_module(_PACKAGE).__path__)}
    return frozenset(stem for stem in stems - {"codecs"} if not (stem.startswith("_") or stem.endswith("_triton")))


@cache
def _option_names(codec_class: type[Codec]) -> tuple[str, ...]:
    """The names of the options that `codec_class` takes. Asking Python takes as long as encoding a small tensor."""
    return tuple(inspect.signature(codec_class).parameters)


def list_codecs() -> list[str]:
    """The names of all codecs, sorted."""
    return sorted(_codec_files())


def get_codec(name: str, **options: Any) -> Codec:
    """A new codec. Raises ValueError for an unknown name, an unknown option or a value out of range."""
    if name not in _codec_files():
        raise ValueError(f"unknown codec {name!r}; known codecs: {', '.join(list_codecs())}")
    if name not in _registry:  # each file registers its codec
        import_module(f"{_PACKAGE}.{name}")
    codec_class = _registry[name]
    known = _option_names(codec_class)
    for option in options:
        if option not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"codec {name!r} has no option {option!r}; its options: {allowed}")
    return codec_class(**options)
