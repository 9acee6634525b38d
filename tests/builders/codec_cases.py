"""Cases of the codec tests: dtypes, shapes and settings, and how they are combined."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parts_of(x: Tensor) -> dict[str, Tensor]:
    """Return contiguous views of a [2, 3, 70, 4] tensor, of many shapes."""
    return {
        "whole": x,
        "offset": x.view(-1)[3:1003].view(10, 100),
        "vector": x.view(-1)[:37],
        "scalar": x[0, 0, 0, 0],
        "one-element": x.view(-1)[7:8],
        "no-elements": x[:0],
        "matrix-1000": x.reshape(-1)[:1000].clone().view(8, 125),
    }


PARTS = tuple(parts_of(torch.empty(2, 3, 70, 4)))

LOSSY = {
    "outlier_int4": {},
    "outlier_int4-g16": {"group_size": 16},
    "outlier_int4-raw2": {"num_outliers": 1},
    "outlier_int4-raw2-g1024": {"num_outliers": 1, "group_size": 1024},
    "channel_int4": {},
    "channel_int4-g16": {"group_size": 16},
    "token_int4": {},
    "int8": {},
    "int8-g1024": {"group_size": 1024},
    "fp8": {},
    "fp8-g16": {"group_size": 16},
    "fp8-g1024": {"group_size": 1024},
    "asymmetric_int4": {},
    "asymmetric_int4-g16": {"group_size": 16},
}


def spread(first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]) -> list[tuple[Any, Any, Any]]:
    """Return all pairs of the first two factors, each with one value of the third, in turn."""
    seconds, thirds = list(second), list(third)
    return [(a, b, thirds[(i + 5 * j) % len(thirds)]) for i, a in enumerate(first) for j, b in enumerate(seconds)]
