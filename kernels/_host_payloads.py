"""Names of the codecs whose payloads (encoded tensors) are in host memory, and sizes of these payloads, rounded as the
pool of host memory rounds them (_host_pool.py). This module does not import torch, because the solver uses it."""

HOST = "host"
"""Name of the codec that stores a tensor unencoded in host memory."""
HOST_SUFFIX = "+host"
"""Suffix of the names of all other codecs that store their payloads in host memory, such as "int8+host"."""
ALIGNMENT = 512
"""Unit in bytes of sizes in the pool of host memory. The size of each tensor is rounded up to a multiple of this
unit."""
MOST_TENSORS = 4
"""Maximum number of tensors in a payload, the encoded form of a tensor."""


def on_host(name: str) -> str:
    """Return the name of the codec that encodes like codec `name`, and stores the payload in host memory."""
    return name + HOST_SUFFIX


def is_on_host(name: str) -> bool:
    """Return True if codec `name` stores its payloads in host memory."""
    return name == HOST or name.endswith(HOST_SUFFIX)


def encoding_of(name: str) -> str:
    """Return the name of the codec that computes the payload of codec `name`: "int8" for "int8+host". Both codecs have
    the same errors."""
    return name.removesuffix(HOST_SUFFIX)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_pool_bytes(nbytes: int, num_tensors: int) -> int:
    """Return the maximum number of bytes that `num_tensors` tensors of `nbytes` in total can take in the pool of host
    memory."""
    return (nbytes + num_tensors * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
