"""Names of codecs that store their payloads in host memory. This module does not import torch, because the solver uses
it."""

HOST = "host"
"""Name of the codec that stores a tensor unencoded in host memory."""
HOST_SUFFIX = "+host"
"""Suffix of the names of all other codecs that store their payloads in host memory, such as "int8+host"."""


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
