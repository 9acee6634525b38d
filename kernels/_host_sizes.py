"""Sizes of payloads in host memory, with the rounding of the pool (_host_pool.py).

This module does not import torch, because the solver uses it.
"""

ALIGNMENT = 512
"""Number of bytes to a multiple of which the size of each tensor in the pool of host memory is rounded up."""
MOST_TENSORS = 4
"""Maximum number of tensors in a payload, the encoded form of a tensor."""


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_pool_bytes(nbytes: int, num_tensors: int) -> int:
    """Return the maximum number of bytes that `num_tensors` tensors of `nbytes` in total can take in the pool of host
    memory."""
    return (nbytes + num_tensors * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
