"""Codec interface, and the registry of codecs.

A codec encodes a tensor to a smaller `Payload`, and decodes the payload again. Each codec is a file of this folder,
named after the codec, with one class decorated with `@register`. To add a codec, add a file with such a class. The
planner knows only the attributes that the class declares. Files whose stem starts with an underscore or ends in
`_triton` are helpers, and are not searched for codecs. Therefore listing codecs never imports triton.
"""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from math import prod
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor

from adacc_hf.kernels import _cpu, _symmetric
from adacc_hf.kernels._host_payloads import is_on_host
from adacc_hf.kernels._layout import rows_and_columns

_PACKAGE = "adacc_hf.kernels"
registry: dict[str, "type[Codec]"] = {}
"""Registered codecs by name, complete after `list_codecs()` was called. Codecs in host memory (_on_host.py) are not
registered."""

MASK = "mask"
ROLES = ("input", MASK, "softmax", "qkv", "norm", "linear", "activation", "other")
"""Roles of tensors. Each codec suits some of them (paper, section 3.2): inputs of a block, masks of two values, softmax
and scores, operands of attention's products, inputs of norms, inputs of other products with parameters, inputs or
results of activation functions, and all other tensors."""
PRECISE = "int8"
"""Name of the codec that is used where the errors of other codecs are too large."""
BASELINE = "token_int4"
"""Name of the codec of the paper's "Quantization" baseline."""

F = TypeVar("F", bound=Callable[..., Any])
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""(shape, dtype) of each tensor of a payload."""


def without_gradients(function: F) -> F:
    """Decorate a function to run with gradients disabled, as under torch.no_grad(). If gradients are disabled already,
    torch.no_grad() is skipped, because it takes ten times as long as the check. Gradients are disabled whenever a
    block's tensors are encoded or decoded, some hundreds of times a step."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        with torch.no_grad():
            return function(*arguments)

    return cast(F, run)


@dataclass(frozen=True, slots=True)
class Payload:
    """Encoded tensor: the tensors that `Codec.encode` stores, and dtype and size of the result of `Codec.decode`."""

    tensors: tuple[Tensor, ...]
    """Stored tensors. Their storages are new, and belong to this payload alone."""
    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of `tensors`, the stored tensors."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Pair of functions that encode and decode on one device type. A module with these two functions can be used in
    place of this class."""

    encode: Callable[..., None]
    """Function that encodes a contiguous tensor into the tensors to store for it: encode(x, *tensors)."""
    decode: Callable[..., None]
    """Function that decodes stored tensors into a contiguous tensor: decode(out, *tensors)."""


class Coder(Protocol):
    """Interface of objects that encode and decode tensors: a codec, or a wrapper around a codec that measures
    errors."""

    def encode(self, tensor: Tensor) -> Payload:
        """Return a payload (encoded tensor) from which `decode` restores `tensor`."""

    def decode(self, payload: Payload) -> Tensor:
        """Return the tensor that `payload` encodes, in new storage."""


class Codec:
    """Base class of all codecs, which encode a tensor to a smaller payload and decode it again.

    `encode` and `decode` never synchronise with the device. The shapes of a payload depend only on the tensor's shape.

    A codec defines at least `supports` and `layout`, and either `encode_traceable` and `decode_traceable` or `encode`
    and `decode`.
    """

    name: ClassVar[str]
    """Name in the registry, equal to the file's stem."""
    lossless: ClassVar[bool] = False
    """True if decode(encode(x)) equals x bit for bit, for every tensor x for which `accepts` returns True."""
    suits: ClassVar[frozenset[str]] = frozenset()
    """Roles (kinds of tensors, see ROLES) for which this codec may be used unless the settings name codecs."""
    keeps_outliers: ClassVar[bool] = False
    """True if the codec stores outlier channels unencoded. The codec's option `num_outliers` is the number of these
    channels (`count_outliers`)."""
    instead_of: ClassVar[str | None] = None
    """Name of another codec, or None for most codecs. If this codec's error on a tensor is smaller than the other
    codec's error, this codec is used in its place.

    A codec that replaces another one is not used elsewhere, unless the settings name it. `adacc plan` and compiled
    graphs never use it, because they have no data on which errors could be compared.
    """

    triton: ClassVar[str | None] = None
    """Name of the file of this folder with the GPU kernels. It is imported when a GPU tensor is first encoded or
    decoded."""
    cpu: ClassVar[Kernels | None] = None
    """C++ kernels for CPU tensors, or None."""
    keeps_rows: ClassVar[bool] = False
    """True if kernels get tensors as matrices [R, C], whose rows run along the last dimension, and otherwise as [N]."""

    @property
    def options(self) -> dict[str, Any]:
        """Options with which `get_codec(codec.name, **codec.options)` builds an equal codec. They can be written as
        JSON."""
        return {name: getattr(self, name) for name in self.option_names()}

    @classmethod
    @cache
    def option_names(cls) -> tuple[str, ...]:
        """Return the names of the codec's options, which are the parameters of its constructor. The names are cached,
        because inspecting a class takes as long as encoding a small tensor."""
        return tuple(inspect.signature(cls).parameters)

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return True if the codec can encode tensors of this shape and dtype."""
        raise NotImplementedError

    def accepts(self, tensor: Tensor) -> bool:
        """Return True if the codec can encode this tensor. Call this method only while profiling, because the method
        may read the data."""
        return self.supports(tuple(tensor.shape), tensor.dtype)

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Return (shape, dtype) of each stored tensor, for an encoded tensor of this shape and dtype."""
        raise NotImplementedError

    def predicted_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the exact size in bytes of an encoded tensor of this shape and dtype, including padding and scales."""
        return sum(prod(size) * stored_dtype.itemsize for size, stored_dtype in self.layout(shape, dtype))

    def fit(self, tensor: Tensor) -> None:
        """Set the codec's state that depends on data, such as the choice of outlier channels, from `tensor`. Call this
        method in tracking steps only, in which outliers and errors are measured. Most codecs have no state."""

    def count_outliers(self, tensor: Tensor) -> int:
        """Return the number of channels of `tensor` with unusually large values. Call this method only in tracking
        steps, in which outliers and errors are measured, because it synchronises with the device."""
        raise NotImplementedError(f"codec {self!r} stores no outliers")

    @without_gradients
    def encode(self, tensor: Tensor) -> Payload:
        """Return a payload (encoded tensor) from which `decode` restores `tensor`, which must be contiguous.

        The payload does not refer to `tensor` or its storage.
        """
        self._require(tensor)
        x = self._as_kernels_get(tensor)
        kernels = self._kernels_for(x)
        tensors = self._encode_plain(x) if kernels is None else self.encode_by(kernels, x)
        return Payload(tensors, tensor.dtype, tuple(tensor.shape))

    @without_gradients
    def decode(self, payload: Payload) -> Tensor:
        """Return the tensor that `payload` encodes, contiguous in new storage, with the original dtype and size."""
        decoded = torch.empty(payload.size, dtype=payload.dtype, device=payload.tensors[0].device)
        out = self._as_kernels_get(decoded)
        kernels = self._kernels_for(out)
        if kernels is None:
            out.copy_(self.decode_traceable(payload.tensors, tuple(out.shape), payload.dtype))
        else:
            self.decode_by(kernels, out, payload.tensors)
        return decoded

    def _as_kernels_get(self, tensor: Tensor) -> Tensor:
        """Return a view of a contiguous tensor as [R, C] if `keeps_rows`, else as [N]."""
        return tensor.view(rows_and_columns(tuple(tensor.shape)) if self.keeps_rows else (tensor.numel(),))

    def _kernels_for(self, tensor: Tensor) -> Kernels | None:
        """Return the codec's kernels for the device of `tensor`, or None if plain torch is used."""
        if tensor.is_cuda:
            return None if self.triton is None else _triton_kernels(self.triton)
        return self.cpu if tensor.is_cpu and _cpu.library() is not None else None

    def encode_by(self, kernels: Kernels, x: Tensor) -> tuple[Tensor, ...]:
        """Encode `x` with `kernels`, and return the tensors to store."""
        tensors = self._new_tensors(x)
        kernels.encode(x, *tensors)
        return tensors

    def _new_tensors(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return new tensors for the payload of `x`."""
        layout = self.layout(tuple(x.shape), x.dtype)
        return tuple(torch.empty(size, dtype=dtype, device=x.device) for size, dtype in layout)

    def decode_by(self, kernels: Kernels, out: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Decode the stored `tensors` into `out` with `kernels`. `out` is [N], or a matrix [R, C] if `keeps_rows`."""
        kernels.decode(out, *tensors)

    def _encode_plain(self, x: Tensor) -> tuple[Tensor, ...]:
        """Encode `x` with plain torch, and return the tensors to store."""
        return self.encode_traceable(x)

    def encode_traceable(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Encode a contiguous tensor with plain torch operators that can be traced into a compiled graph.

        Control flow is static, and no operator writes in place. The result equals, bit for bit, the tensors that
        `encode` stores if `fit(tensor)` is called directly before `encode`. Raise NotImplementedError if the codec
        cannot be traced, because its result also depends on other state.
        """
        raise NotImplementedError(f"codec {self!r} cannot be used in a compiled graph")

    def decode_traceable(self, tensors: tuple[Tensor, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode `tensors`, the result of `encode_traceable`, to a contiguous tensor that equals the result of `decode`
        bit for bit."""
        raise NotImplementedError(f"codec {self!r} cannot be used in a compiled graph")

    @classmethod
    def is_traceable(cls) -> bool:
        """Return True if the codec can be used in a compiled graph."""
        return cls.encode_traceable is not Codec.encode_traceable

    def _require(self, tensor: Tensor) -> None:
        if not self.supports(tuple(tensor.shape), tensor.dtype):
            raise TypeError(
                f"codec {self.name!r} with options {self.options} cannot encode shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}: check supports(shape, dtype) first"
            )

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({options})"


class GroupCodec(Codec):
    """Base class of codecs for floating-point tensors that encode groups of `group_size` elements."""

    def __init__(self, group_size: int = 64) -> None:
        if group_size not in _symmetric.GROUP_SIZES:
            raise ValueError(f"codec {self.name!r}: group_size={group_size!r} is not one of {_symmetric.GROUP_SIZES}")
        self.group_size = group_size

    def supports(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return dtype in _symmetric.FLOAT_DTYPES


C = TypeVar("C", bound=type[Codec])


def register(codec_class: C) -> C:
    """Add a codec class to the registry under its `name`. Use this function as a decorator. Raise ValueError if the
    attributes of the class are inconsistent."""
    name, unknown = codec_class.name, sorted(codec_class.suits.difference(ROLES))
    if unknown:
        raise ValueError(f"codec {name!r}: suits={unknown} are unknown: choose from {', '.join(ROLES)}")
    if MASK in codec_class.suits and not codec_class.lossless:
        raise ValueError(f"codec {name!r}: suits masks, which must be stored without loss: set lossless=True")
    other = codec_class.instead_of
    if other is not None and (other not in registry or not codec_class.suits <= registry[other].suits):
        raise ValueError(
            f"codec {name!r}: instead_of={other!r} must name a registered codec that suits all of "
            f"{sorted(codec_class.suits)}: import its file first, or set instead_of=None"
        )
    registry[name] = codec_class
    return codec_class


@cache
def _triton_kernels(file: str) -> Any:
    return import_module(f"{_PACKAGE}.{file}")


@cache
def _import_codecs() -> None:
    """Import every codec file of this folder once, so that `registry` is complete."""
    for module in pkgutil.iter_modules(import_module(_PACKAGE).__path__):
        if not (module.name.startswith("_") or module.name.endswith("_triton")):
            import_module(f"{_PACKAGE}.{module.name}")


def list_codecs() -> list[str]:
    """Return the names of all codecs, sorted."""
    _import_codecs()
    return sorted(registry)


def get_codec(name: str, **options: Any) -> Codec:
    """Return a codec, built from a codec's name and options. Raise ValueError for an unknown name, an unknown option or
    a value out of range."""
    cls = codec_type(name)
    option_names = cls.option_names()
    for option in options:
        if option not in option_names:
            allowed = ", ".join(option_names) or "none"
            raise ValueError(f"codec {name!r} has no option {option!r}; its options: {allowed}")
    return cls(**options)


def codec_type(name: str) -> type[Codec]:
    """Return the class of the codec `name`. The name "host", or "<codec>+host", is a codec that stores payloads in host
    memory. Raises ValueError for an unknown name."""
    _import_codecs()
    if is_on_host(name):
        return import_module(f"{_PACKAGE}._on_host").host_codec(name)
    if name not in registry:
        raise ValueError(f"unknown codec {name!r}; known codecs: {', '.join(list_codecs())}")
    return registry[name]


def codecs_suiting(role: str) -> list[str]:
    """Return the names of the codecs that suit tensors of `role`, one of ROLES."""
    return [name for name in list_codecs() if role in registry[name].suits]


def replacements(name: str, role: str) -> list[str]:
    """Return the names of the codecs that replace codec `name` on tensors of `role` if their error is smaller."""
    return [other for other in codecs_suiting(role) if registry[other].instead_of == name]
