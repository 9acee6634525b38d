"""Sizes of payloads in host memory, with the rounding of the pool (_host_pool.py). Without torch, for the solver."""

ALIGNMENT = 512
"""Multiple in bytes to which the tensors of the pool are rounded up."""
MOST_TENSORS = 4
"""Maximum number of tensors in a payload."""


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_pool_bytes(nbytes: int, num_tensors: int) -> int:
    """Return the most bytes of the pool that a payload of `nbytes` in `num_tensors` tensors can take."""
    return (nbytes + num_tensors * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
