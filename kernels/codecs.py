"""The codec interface and the registry that finds codecs.

A codec turns a tensor into a smaller `Payload` and back. Each codec is one file of this folder, named after the codec,
holding one class decorated with `@register`; adding a codec means adding that file: what the codec says of itself there
is all that the planner knows of it. Files whose stem starts with an underscore or ends in `_triton` are helpers and are
not searched, so listing codecs never imports triton.
"""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu
from adacc_hf.kernels._layout import as_flat, as_matrix, restore

_PACKAGE = "adacc_hf.kernels"
_registry: dict[str, "type[Codec]"] = {}

MASK = "mask"
ROLES = ("input", MASK, "softmax", "qkv", "norm", "linear", "activation", "other")
"""Classes of tensors that codecs suit (paper, section 3.2): inputs of a block, masks of two values, softmax and score,
what attention multiplies, what norms read, what other products with parameters read, what activation functions read or
give, and the rest."""


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


@dataclass(frozen=True, slots=True)
class Kernels:
    """A codec's formula for one kind of device. A module with these two functions does as well."""

    encode: Callable[..., tuple[Tensor, ...]]
    """From a contiguous tensor to the tensors that are kept of it."""
    decode: Callable[..., None]
    """Fills a contiguous tensor from them."""


class Coder(Protocol):
    """What encodes a tensor and decodes it: a codec, or what stands in its place for a while."""

    def encode(self, tensor: Tensor) -> Payload:
        """See `Codec.encode`."""

    def decode(self, payload: Payload) -> Tensor:
        """See `Codec.decode`."""


class Codec:
    """Base class of all codecs. `encode` and `decode` never synchronise with the device; their shapes are static.

    A codec has at least `supports`, `predicted_bytes`, and its formula: `encode_traceable` and `decode_traceable`, or
    else `encode` and `decode`. One with `triton` or `cpu` kernels also says how they are called.
    """

    name: ClassVar[str]
    """The name in the registry, equal to the file's stem."""
    lossless: ClassVar[bool] = False
    """True if decode(encode(x)) is x bit for bit, for every x that `accepts` lets through."""
    suits: ClassVar[frozenset[str]] = frozenset()
    """Those of ROLES whose tensors may be stored with this codec unless the settings name others."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """Options that take their values from the settings of the same name."""
    keeps_outliers: ClassVar[bool] = False
    """Whether its option `num_outliers` says how many channels are kept as they are: `count_outliers` finds as many."""
    stands_in: ClassVar[bool] = False
    """Whether it is the precise codec for what those that suit it are too coarse for. One codec is."""
    instead_of: ClassVar[str | None] = None
    """Name of the codec that this one replaces on tensors where this one's round trip is more exact, unless the
    settings name codecs. `adacc plan` and compiled graphs have no data to decide by, and leave this codec out. None for
    a codec that is offered wherever it suits."""
    is_baseline: ClassVar[bool] = False
    """Whether it is the codec of the paper's "Quantization" baseline. One codec is."""

    triton: ClassVar[str | None] = None
    """The file of this folder with its kernels for GPUs, imported when a tensor on one is first encoded or decoded."""
    cpu: ClassVar[Kernels | None] = None
    """Its kernels in C++."""
    keeps_rows: ClassVar[bool] = False
    """Whether its formula sees tensors as [R, C], rows of the last dimension, or as [N] in the order of memory."""

    @property
    def options(self) -> dict[str, Any]:
        """JSON-able options that rebuild this codec: `get_codec(codec.name, **codec.options)`."""
        return {name: getattr(self, name) for name in self.option_names()}

    @classmethod
    @cache
    def option_names(cls) -> tuple[str, ...]:
        """The names of the options that the codec takes. Asking Python takes as long as encoding a small tensor."""
        return tuple(inspect.signature(cls).parameters)

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

    def count_outliers(self, tensor: Tensor, threshold: float) -> int:
        """How many channels have a Z-score above `threshold`. Synchronises: for tracking iterations only."""
        raise NotImplementedError(f"codec {self!r} keeps no outliers")

    @without_gradients
    def encode(self, tensor: Tensor) -> Payload:
        """A payload from which `decode` restores `tensor`. Keeps no reference to `tensor` or its storage."""
        self._require(tensor)
        x = as_matrix(tensor) if self.keeps_rows else as_flat(tensor)
        kernels = self._kernels_for(x)
        tensors = self._encode_plain(x) if kernels is None else self._encode_by(kernels, x)
        return Payload(tensors, tensor.dtype, tuple(tensor.shape), tensor.stride())

    @without_gradients
    def decode(self, payload: Payload) -> Tensor:
        """The tensor in fresh storage, with the dtype, size and stride of the one encoded."""

        def fill(out: Tensor) -> None:
            kernels = self._kernels_for(out)
            if kernels is None:
                out.copy_(self.decode_traceable(payload.tensors, tuple(out.shape), payload.dtype))
            else:
                self._decode_by(kernels, out, payload.tensors)

        return restore(fill, payload, self.keeps_rows)

    def _kernels_for(self, tensor: Tensor) -> Kernels | None:
        """Triton's on a GPU, those in C++ on a CPU where they can be built; None where plain torch serves."""
        if tensor.is_cuda:
            return None if self.triton is None else _triton_kernels(self.triton)
        return self.cpu if _cpu.usable(tensor) else None

    def _encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        """What `kernels` keep of [N], or of [R, C] if `keeps_rows`."""
        raise NotImplementedError

    def _decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Let `kernels` fill [N], or [R, C] if `keeps_rows`."""
        raise NotImplementedError

    def _encode_plain(self, x: Tensor) -> tuple[Tensor, ...]:
        """What plain torch keeps of [N], or of [R, C] if `keeps_rows`: the reference of all kernels."""
        return self.encode_traceable(x)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """What `encode` keeps of a contiguous tensor, by plain torch operators that may stand in a compiled graph.

        Static control flow and no in-place operator; bit-equal to `encode` right after `fit`. Raises
        NotImplementedError for a codec that needs other state than `fit` finds in the tensor.
        """
        raise NotImplementedError(f"codec {self!r} cannot stand in a compiled graph")

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor from what `encode_traceable` returned; bit-equal to `decode`."""
        raise NotImplementedError(f"codec {self!r} cannot stand in a compiled graph")

    @classmethod
    def is_traceable(cls) -> bool:
        """Whether the codec may stand in a compiled graph."""
        return cls.encode_traceable is not Codec.encode_traceable

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
    """Class decorator: make a codec known under its `name`. Raises ValueError if what it says of itself cannot be."""
    name, unknown = codec_class.name, sorted(codec_class.suits.difference(ROLES))
    if unknown:
        raise ValueError(f"codec {name!r}: suits={unknown} are unknown; choose from {', '.join(ROLES)}")
    if MASK in codec_class.suits and not codec_class.lossless:
        raise ValueError(f"codec {name!r}: suits masks, which are stored without loss; set lossless=True or leave it")
    for claim in ("stands_in", "is_baseline"):
        others = [other.name for other in _registry.values() if getattr(other, claim) and other.name != name]
        if getattr(codec_class, claim) and others:
            raise ValueError(f"codec {name!r}: {claim}=True is said by {others[0]!r} already; leave it False")
    other = codec_class.instead_of
    if other is not None and (other not in _registry or not codec_class.suits <= _registry[other].suits):
        raise ValueError(
            f"codec {name!r}: instead_of={other!r} must name a registered codec that suits all of "
            f"{sorted(codec_class.suits)}; import its file first, or set instead_of=None"
        )
    _registry[name] = codec_class
    return codec_class


@cache
def _triton_kernels(file: str) -> Any:
    """The module of a codec's kernels for GPUs."""
    return import_module(f"{_PACKAGE}.{file}")


@cache
def _discover() -> None:
    """Import every codec file of this folder once, so that `_registry` is complete."""
    for module in pkgutil.iter_modules(import_module(_PACKAGE).__path__):
        if not (module.name.startswith("_") or module.name.endswith("_triton")):
            import_module(f"{_PACKAGE}.{module.name}")


def list_codecs() -> list[str]:
    """The names of all codecs, sorted."""
    _discover()
    return sorted(_registry)


def get_codec(name: str, **options: Any) -> Codec:
    """A new codec. Raises ValueError for an unknown name, an unknown option or a value out of range."""
    cls = codec_type(name)
    known = cls.option_names()
    for option in options:
        if option not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"codec {name!r} has no option {option!r}; its options: {allowed}")
    return cls(**options)


def codec_type(name: str) -> type[Codec]:
    """The class of the codec `name`. Raises ValueError for an unknown one."""
    _discover()
    if name not in _registry:
        raise ValueError(f"unknown codec {name!r}; known codecs: {', '.join(list_codecs())}")
    return _registry[name]


def codecs_suiting(role: str) -> list[str]:
    """The names of the codecs that suit tensors of `role`, one of ROLES."""
    return [name for name in list_codecs() if role in _registry[name].suits]


def replacements(name: str, role: str) -> list[str]:
    """Return the names of the codecs that replace the codec `name` on tensors of `role` where they are more exact."""
    return [other for other in codecs_suiting(role) if _registry[other].instead_of == name]


@cache
def precise_codec() -> str:
    """The name of the codec that stands in where others are too coarse."""
    return next(name for name in list_codecs() if _registry[name].stands_in)


@cache
def baseline_codec() -> str:
    """The name of the codec of the paper's "Quantization" baseline."""
    return next(name for name in list_codecs() if _registry[name].is_baseline)
