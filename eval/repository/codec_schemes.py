"""Compression schemes that the gradient-error table compares, and their application to a model.

Schemes of one codec: plain saved-tensor hooks send every float tensor that a block saves, of any size, through that
codec. Under every scheme parameters stay as they are, and masks are stored exactly. "layer-specific": the paper's
scheme (section 3.2), as a policy that the executor runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from adacc_hf import Policy
from adacc_hf.artifacts.policy import Choice
from adacc_hf.kernels.codecs import Codec, get_codec, list_codecs
from adacc_hf.kernels.outlier_int4 import count_outliers
from adacc_hf.run.block_search import find_blocks
from adacc_hf.torch_glue.tensors import difference_norm, l2_norm

LAYER_SPECIFIC = "layer-specific"
NO_OUTLIERS = "outlier_int4 without outliers"

SCALES = ("paper", "signed", "max7", "range15")
GROUP_SIZES = (16, 32, 64, 128)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Codec, or the layer-specific mixture of codecs, with its options. An option that the codec does not have is
    None."""

    name: str
    scale: str | None = None
    group_size: int | None = None
    rounding: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        fields = {"scale": self.scale, "group_size": self.group_size, "rounding": self.rounding}
        return {name: value for name, value in fields.items() if value is not None}


def codec_schemes() -> list[Scheme]:
    """Return every lossy codec with every combination of its options."""
    lossy = [name for name in list_codecs() if not get_codec(name).lossless]
    schemes = [scheme for name in lossy for scheme in _variants(name, set(get_codec(name).options))]
    plain_groups = [replace(scheme, name=NO_OUTLIERS) for scheme in schemes if scheme.name == "outlier_int4"]
    return schemes + plain_groups


def layer_specific_schemes() -> list[Scheme]:
    """Return the layer-specific schemes with every combination of options.

    The scales are the symmetric codecs' scales. If the scale is not the paper's, asymmetric_int4 has "range15".
    """
    return [
        Scheme(name=LAYER_SPECIFIC, scale=scale, group_size=group_size, rounding=rounding)
        for scale, rounding, group_size in product(("paper", "signed", "max7"), ROUNDINGS, GROUP_SIZES)
    ]


def _variants(codec: str, option_names: set[str]) -> Iterator[Scheme]:
    scales = SCALES if "scale" in option_names else (None,)
    roundings = ROUNDINGS if "rounding" in option_names else (None,)
    group_sizes = GROUP_SIZES if "group_size" in option_names else (None,)
    for scale, rounding, group_size in product(scales, roundings, group_sizes):
        scheme = Scheme(name=codec, scale=scale, group_size=group_size, rounding=rounding)
        if accepts_options(codec, scheme.options):
            yield scheme


def accepts_options(codec: str, options: dict[str, Any]) -> bool:
    """Return True if the codec accepts these option values. Each codec has its own scales."""
    try:
        get_codec(codec, **options)
    except ValueError:
        return False
    return True


def with_options(policy: Policy, scheme: Scheme) -> Policy:
    """Return `policy` with the scheme's options for each codec that accepts these options."""
    plans = tuple(
        replace(plan, choices=tuple((value, _with_options(choice, value, scheme)) for value, choice in plan.choices))
        for plan in policy.plans
    )
    return replace(policy, plans=plans)


def _with_options(choice: Choice, value: int, scheme: Scheme) -> Choice:
    options = dict(choice.options)
    # Each activation has a seed of its own. With one seed, all would be rounded by the same noise.
    for name, new_value in {**scheme.options, "seed": value}.items():
        if choice.codec is not None and name in options and accepts_options(choice.codec, {name: new_value}):
            options[name] = new_value
    return replace(choice, options=tuple(sorted(options.items())))


class RoundTrips:
    """Context manager that sends the tensors saved by the model's blocks through a scheme's codec and back."""

    def __init__(self, model: nn.Module, scheme: Scheme) -> None:
        self.scheme = scheme
        self.num_tensors = 0
        """Number of encoded tensors."""
        self._norm = self._difference_norm = 0.0
        self._in_block = False
        self._parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._mask = get_codec("bitmask")
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._blocks = [block for _, block in find_blocks(model)]
        self._handles: list[Any] = []

    def __enter__(self) -> RoundTrips:
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(lambda *_: self._enter_block(True)))
            self._handles.append(block.register_forward_hook(lambda *_: self._enter_block(False), always_call=True))
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    @property
    def error(self) -> float:
        """Return the relative L2 error of the decoded tensors, all as one vector."""
        return self._difference_norm / self._norm

    def _enter_block(self, inside: bool) -> None:
        self._in_block = inside

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_parameter = tensor.untyped_storage()._cdata in self._parameters
        if not self._in_block or is_parameter or not tensor.is_floating_point() or self._mask.accepts(tensor):
            return tensor
        codec = self._codec(tensor)
        # Detached: a tensor that is saved by the node that created it would never be freed.
        return codec, codec.encode(tensor), tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        codec, payload, original = packed
        restored = codec.decode(payload)
        self._norm = math.hypot(self._norm, float(l2_norm([original])))
        self._difference_norm = math.hypot(self._difference_norm, float(difference_norm([original], [restored])))
        return restored

    def _codec(self, tensor: torch.Tensor) -> Codec:
        self.num_tensors += 1
        name = "outlier_int4" if self.scheme.name == NO_OUTLIERS else self.scheme.name
        options = dict(self.scheme.options)
        if self.scheme.name == "outlier_int4":
            options["num_outliers"] = count_outliers(tensor)
        if "seed" in get_codec(name).options:
            options["seed"] = self.num_tensors  # with one seed, all would be rounded by the same noise
        return get_codec(name, **options)
