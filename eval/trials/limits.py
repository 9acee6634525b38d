"""The memory limit of a run: the device's, or what `--limit` says."""

from __future__ import annotations

import argparse

import torch

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.units import parse_bytes

CPU_LIMIT = "256MiB"
"""Where no limit is given on a CPU, whose own memory says nothing: plain training of the demo ends at batch 2 in it."""

BLOCKS_SHARE = {"cpu": 0.0, "cuda": 0.01}
"""What a GPU's allocator may count beyond the bytes of tensors, as a part of them: it gives them out in blocks."""


def keeps_to(nbytes: int, budget: int, device: str) -> bool:
    """Whether bytes that were measured on `device` are no more than `budget`, but for the allocator's blocks."""
    return nbytes <= budget * (1.0 + BLOCKS_SHARE[device])


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add the option that limits the memory of a training step."""
    parser.add_argument(
        "--limit",
        help=f"memory that a training step may take, say 16GiB (default: all of the GPU; {CPU_LIMIT} of counted live "
        "tensors on a CPU)",
    )


def limit_bytes(arguments: argparse.Namespace) -> int:
    """The limit in bytes. Raises ValueError for a text that is no size."""
    if arguments.limit is not None:
        return parse_bytes(arguments.limit, "--limit")
    if arguments.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return parse_bytes(CPU_LIMIT, "--limit")


def budget_bytes(limit: int, device: str) -> int:
    """The budget for Adacc under a limit: on a GPU less the margin of "auto", whose segments expand in measurements."""
    return limit if device == "cpu" else int(limit * (1.0 - AdaccConfig().memory_margin))
