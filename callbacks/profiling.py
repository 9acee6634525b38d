"""Which batch a profile is made of: one that calls every block, and that has the wanted sizes if the model lets it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from adacc_hf.callbacks.waiting import Waiting
from adacc_hf.errors import UncalledBlocksError
from adacc_hf.profile import Profile
from adacc_hf.profiler import describe_uncalled
from adacc_hf.ranks import from_first_rank, is_sharded, of_all_ranks
from adacc_hf.tracking.shapes import BatchShapes, bucket_of, describe, resized

log = logging.getLogger(__name__)

MOST_STEPS = 64
"""Steps that training waits for a batch that calls every block. Where one in eight has an image that takes more with a
chance of 1 in 5,000."""


def is_ready(waiting: Waiting, num_waited: int) -> bool:
    """Whether the last batch, on every rank, called all blocks, so that it can be profiled.

    Raises UncalledBlocksError after `num_waited` steps, MOST_STEPS or more.
    """
    left_out = waiting.left_out()
    if all(of_all_ranks(not left_out)):
        return True
    if num_waited >= MOST_STEPS:
        raise UncalledBlocksError(describe_uncalled(waiting, left_out, f"by the last of {num_waited} steps"))
    return False


def profile_at(
    wanted: BatchShapes,
    batch: dict[str, Any],
    seen: BatchShapes,
    model: nn.Module,
    profile: Callable[[dict[str, Any]], Profile],
) -> tuple[BatchShapes, Profile] | None:
    """(sizes, profile) of `batch`, which has the sizes `seen`, made to the `wanted` ones.

    A model may take no such batch: of images of several sizes, patches and texts hang together in ways that sizes do
    not tell. Then `batch` is profiled as it is, if one policy does for it and the wanted sizes; None if not.
    """
    try:
        return wanted, profile(resized(batch, seen, wanted))
    except (torch.OutOfMemoryError, UncalledBlocksError):
        raise
    except Exception as error:
        if seen == wanted or is_sharded(model):
            raise
        log.info(
            "Adacc: the model takes no batch of %s made to %s (%s), so that one is profiled as it comes",
            *map(describe, (seen, wanted)),
            error,
        )
    if not all(of_all_ranks(bucket_of(seen) == bucket_of(wanted))):
        return None
    return from_first_rank(lambda: seen), profile(batch)
