"""Names of codecs whose payloads are in host memory. This module imports no torch, because the solver uses it."""

HOST = "host"
"""Name of the codec that stores a tensor unencoded in host memory."""
HOST_SUFFIX = "+host"
"""End of the names of all other codecs whose payloads are in host memory, such as "int8+host"."""


def on_host(name: str) -> str:
    """Return the name of the codec that stores the payload of codec `name` in host memory."""
    return name + HOST_SUFFIX


def is_on_host(name: str) -> bool:
    """Return True if the payloads of codec `name` are in host memory."""
    return name == HOST or name.endswith(HOST_SUFFIX)


def encoding_of(name: str) -> str:
    """Return the name of the codec that computes the payload of codec `name`: "int8" for "int8+host".

    Both codecs have the same errors.
    """
    return name.removesuffix(HOST_SUFFIX)
