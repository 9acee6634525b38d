"""Sizes of payloads (encoded tensors) in host memory, rounded as the pool of host memory rounds them (_host_pool.py).

This module does not import torch, because the solver uses it.
"""

ALIGNMENT = 512
"""Unit in bytes of sizes in the pool of host memory. The size of each tensor is rounded up to a multiple of this
unit."""
MOST_TENSORS = 4
"""Maximum number of tensors in a payload, the encoded form of a tensor."""


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_pool_bytes(nbytes: int, num_tensors: int) -> int:
    """Return the maximum number of bytes that `num_tensors` tensors of `nbytes` in total can take in the pool of host
    memory."""
    return (nbytes + num_tensors * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
