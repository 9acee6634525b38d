"""Agreement between the ranks of a distributed run; with one process these do nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from adacc_hf.errors import AdaccError
from adacc_hf.policy import Policy
from adacc_hf.profile import Profile


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def least_over_ranks(profile: Profile) -> Profile:
    """`profile` with the least available memory of all ranks."""
    if num_ranks() == 1:
        return profile
    available: list[int] = [0] * num_ranks()
    dist.all_gather_object(available, profile.available_bytes)
    return replace(profile, available_bytes=min(available))


def from_first_rank(solve: Callable[[], Policy]) -> Policy:
    """The policy that the first rank solves, on every rank; an error there is raised everywhere."""
    if num_ranks() == 1:
        return solve()
    message: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            message[0] = solve().to_json()
        except Exception as error:
            message[0] = error
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    if message[0] is None:
        raise AdaccError("the first rank sent no policy")
    return Policy.from_json(message[0], "the policy of the first rank")
