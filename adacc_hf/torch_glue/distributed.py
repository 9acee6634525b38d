"""Agreement between the ranks of a distributed run; with one process these do nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from adacc_hf.artifacts.errors import AdaccError, PolicyMismatchError, RankFailedError
from adacc_hf.torch_glue.private import LOCAL_TENSOR, SHARDED_SIZE

if TYPE_CHECKING:
    from torch import nn

    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile

T = TypeVar("T")


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    return num_ranks() == 1 or dist.get_rank() == 0


def of_all_ranks(value: T) -> list[T]:
    """The `value` of every rank, in their order."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks hold parts of its parameters and gather them around forward (FSDP2, FSDP, ZeRO-3)."""
    return any(
        hasattr(parameter, LOCAL_TENSOR) or hasattr(parameter, SHARDED_SIZE) or parameter.numel() == 0
        for parameter in module.parameters()
    )


class OutOfMemoryOnRankError(torch.OutOfMemoryError):
    """Memory ran out on some rank, and all ranks heard of it."""


@contextmanager
def all_or_none() -> Iterator[None]:
    """What fails here on one rank fails on all, so that none waits for another for ever; all ranks must get here.

    Raises OutOfMemoryOnRankError on every rank if memory ran out on any; after any other error that one on the rank
    where it happened and RankFailedError on the others. No rank may wait inside for another one.
    """
    if num_ranks() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except (OutOfMemoryOnRankError, RankFailedError):
        raise  # the others heard of it
    except Exception as raised:
        error = raised
    _raise_on_all(error)


@contextmanager
def or_ends_its_process() -> Iterator[None]:
    """If memory runs out here on one of several ranks, raise RankFailedError, which nobody tries again.

    For what has collectives inside: the others may wait in any of them and cannot be told, but by the launcher, which
    stops them once this process has ended.
    """
    try:
        yield
    except OutOfMemoryOnRankError:
        raise
    except torch.OutOfMemoryError as error:
        if num_ranks() == 1:
            raise
        raise RankFailedError(
            f"rank {dist.get_rank()} ran out of memory where the other ranks wait for its part of the parameters, so "
            f"that this process must end for the launcher to stop them ({error})"
        ) from error


def _raise_on_all(error: Exception | None) -> None:
    is_memory = isinstance(error, torch.OutOfMemoryError)
    found = of_all_ranks(None if error is None else (is_memory, f"{type(error).__name__}: {error}"))
    failures = [(rank, *failure) for rank, failure in enumerate(found) if failure is not None]
    if not failures:
        return
    rank, _, what = failures[0]
    for failed, is_memory, how in failures:
        if is_memory:
            raise OutOfMemoryOnRankError(f"rank {failed}: {how}") from error
    raise error if error is not None else RankFailedError(f"rank {rank} failed with {what}")


def check_same_policy(policy: Policy) -> None:
    """Raise PolicyMismatchError, on every rank, unless all ranks follow the same policy."""
    digests = of_all_ranks(policy.digest)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise PolicyMismatchError(
            f"rank {different[0]} has another policy than rank 0 (digest {digests[different[0]][:12]} against "
            f"{digests[0][:12]}), {len(different)} of {len(digests)} ranks in all: all ranks must train the same model "
            f"with the same settings and releases; compare their arguments"
        )


def common_profile(profile: Profile) -> Profile:
    """The first rank's `profile`, on every rank, with the least available memory of all.

    Prices and outliers differ between ranks, and what is decided from them later, such as when to solve, must not: a
    rank that asks the others for a solution which they do not know of waits for ever.
    """
    if num_ranks() == 1:
        return profile
    least = min(of_all_ranks(profile.available_bytes))
    return replace(from_first_rank(lambda: profile), available_bytes=least)


def from_first_rank(make: Callable[[], T]) -> T:
    """What `make` returns on the first rank, on every rank; an error there is raised everywhere."""
    if num_ranks() == 1:
        return make()
    if dist.get_rank() == 0:
        try:
            result = make()
        except Exception as error:
            dist.broadcast_object_list([None, _sendable(error)], src=0)
            raise
        dist.broadcast_object_list([result, None], src=0)
        return result
    message: list[Any] = [None, None]
    dist.broadcast_object_list(message, src=0)
    if message[1] is not None:
        raise _rebuilt(*message[1])
    return message[0]


SentError = tuple[type[Exception], tuple[Any, ...], dict[str, Any]]
"""An error's class, arguments and attributes: an error itself does not survive pickling if its class takes arguments of
its own, and a message that fails to arrive leaves the other ranks waiting for ever."""


def _sendable(error: Exception) -> SentError:
    """The parts of `error`; of one that says the same where they cannot be pickled."""
    parts = (type(error), error.args, vars(error))
    try:
        _rebuilt(*pickle.loads(pickle.dumps(parts)))
    except Exception:
        return AdaccError, (f"the first rank failed with {type(error).__name__}: {error}",), {}
    return parts


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error
