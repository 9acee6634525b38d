"""The memory limit of a run: the device's memory, or `--limit`."""

from __future__ import annotations

import argparse

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.units import parse_bytes

CPU_LIMIT = "256MiB"
"""Default limit on a CPU, where the machine's memory is not a useful limit. Plain training of the demo fits up to batch
2."""


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add the option that limits the memory of a training step."""
    parser.add_argument(
        "--limit",
        help=f"memory limit of a training step, for example 16GiB (default: all of the GPU; on a CPU {CPU_LIMIT} of "
        "live tensors)",
    )


def limit_bytes(arguments: argparse.Namespace) -> int:
    """Return the limit in bytes. Raise ValueError for a string that is not a size."""
    if arguments.limit is not None:
        return parse_bytes(arguments.limit, "--limit")
    if arguments.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return parse_bytes(CPU_LIMIT, "--limit")


def budget_bytes(limit: int, device: str) -> int:
    """Return Adacc's budget under a limit.

    On a GPU, `memory_margin` is subtracted. Nothing is reserved for fragmentation, because measurements use expandable
    segments.
    """
    return limit if device == "cpu" else int(limit * (1.0 - AdaccConfig().memory_margin))
