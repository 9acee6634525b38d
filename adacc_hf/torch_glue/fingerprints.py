"""Fingerprints of tensors: bits, norm and some elements, to compare trainings whose tensors are in different processes
or at different times."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLE_ELEMENTS = 64
"""Maximum number of elements in a fingerprint, evenly spaced."""


class Fingerprint(NamedTuple):
    """Bits of a tensor as a digest, and figures from which a difference is estimated."""

    digest: str
    norm: float
    elements: tuple[float, ...]

    def relative_error(self, expected: Fingerprint) -> float:
        """Return the relative L2 error, estimated from the elements. If they are equal, use the norms."""
        norm = math.hypot(*expected.elements)
        error = math.hypot(*map(_difference, self.elements, expected.elements))
        if not error:
            error, norm = _difference(self.norm, expected.norm), expected.norm
        return error / norm if norm else math.inf

    def largest_difference(self, expected: Fingerprint) -> float:
        """Return the largest absolute difference of the elements."""
        return max(map(_difference, self.elements, expected.elements), default=0.0)


def _difference(first: float, second: float) -> float:
    return 0.0 if first == second else abs(first - second)  # two infinities are equal


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor. For a sharded tensor, only this rank's part is read."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().to("cpu").contiguous().reshape(-1)
    elements = flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)][:SAMPLE_ELEMENTS].double()
    digest = hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=8).hexdigest()
    return Fingerprint(digest, float(flat.double().norm()), tuple(elements.tolist()))


def gradient_fingerprints(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Fingerprint]:
    """Return the fingerprints of the gradients of named parameters. Parameters without a gradient are left out."""
    return {f"gradient of {name}": fingerprint(p.grad) for name, p in parameters if p.grad is not None}
