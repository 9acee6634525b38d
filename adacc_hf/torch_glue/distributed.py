"""Communication between the ranks of a distributed run. If there is only one process, no function communicates."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from adacc_hf.artifacts.errors import AdaccError, PolicyMismatchError, RankFailedError
from adacc_hf.torch_glue.private import LOCAL_TENSOR, SHARDED_SIZE, whole_gradients

if TYPE_CHECKING:
    from torch import nn

    from adacc_hf.artifacts.policy import Policy
    from adacc_hf.artifacts.profile import Profile

T = TypeVar("T")


def num_ranks() -> int:
    """Return the number of ranks, or 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Return True on the first rank of a distributed run, and in a run without other ranks."""
    return num_ranks() == 1 or dist.get_rank() == 0


def gather_from_all_ranks(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order. All ranks must call this function."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


_SHARD_ATTRIBUTES = (LOCAL_TENSOR, SHARDED_SIZE, "ds_tensor")
"""Names of attributes that only sharded parameters have (FSDP2, FSDP, DeepSpeed's ZeRO-3), also while they are
gathered."""


def is_sharded(module: nn.Module) -> bool:
    """Return True if the module's parameters are sharded among ranks, and gathered for forward (FSDP2, FSDP,
    ZeRO-3)."""
    return any(
        parameter.numel() == 0 or any(hasattr(parameter, name) for name in _SHARD_ATTRIBUTES)
        for parameter in module.parameters()
    )


def reshard(model: nn.Module) -> None:
    """Shard the parameters of all FSDP2 modules in `model`. FSDP2 leaves those of the outermost module gathered after a
    forward, until a backward, and `model.parameters()` does not return the sharded ones, which an optimizer needs."""
    for module in _fsdp2_modules(model):
        module.reshard()


def _fsdp2_modules(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes long, and who shards a model has imported it
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of the model's parameters, and the whole gradients that FSDP2 holds in all micro-batches of
    a step but the last."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return gradients + [gradient for module in _fsdp2_modules(model) for gradient in whole_gradients(module)]


class OutOfMemoryOnRankError(torch.OutOfMemoryError):
    """Error raised on all ranks if any rank ran out of memory."""


@contextmanager
def fail_together() -> Iterator[None]:
    """Make all ranks raise an error at the end of the `with` block if the block has failed on any rank, for which the
    others could wait forever.

    If memory runs out on any rank, raise OutOfMemoryOnRankError on all. For any other error, raise RankFailedError on
    the other ranks. All ranks must enter the `with` block, and the block must not contain a collective.
    """
    if num_ranks() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except (OutOfMemoryOnRankError, RankFailedError):
        raise  # the other ranks raise the same error
    except Exception as exception:
        error = exception
    is_oom = isinstance(error, torch.OutOfMemoryError)
    results = gather_from_all_ranks(None if error is None else (is_oom, f"{type(error).__name__}: {error}"))
    failures = [(rank, *failure) for rank, failure in enumerate(results) if failure is not None]
    if not failures:
        return
    first_rank, _, first_message = failures[0]
    for rank, is_oom, message in failures:
        if is_oom:
            raise OutOfMemoryOnRankError(f"rank {rank}: {message}") from error
    raise error if error is not None else RankFailedError(f"rank {first_rank} failed with {first_message}")


def check_same_policy(policy: Policy) -> None:
    """Raise PolicyMismatchError on every rank unless all ranks have the same policy."""
    digests = gather_from_all_ranks(policy.digest)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise PolicyMismatchError(
            f"rank {different[0]} has another policy than rank 0 (digest {digests[different[0]][:12]} instead of "
            f"{digests[0][:12]}), {len(different)} of {len(digests)} ranks in all: all ranks must train the same model "
            f"with the same settings and package versions; compare their arguments"
        )


def common_profile(profile: Profile, preference: int = 0) -> Profile:
    """Return, on every rank, the profile of the first rank with the largest `preference`, with the least available
    memory of all ranks and of their hosts.

    Measured costs differ between ranks, but decisions based on them, such as when to solve, must be equal: a rank that
    starts the solver alone would wait for the others forever.
    """
    if num_ranks() == 1:
        return profile
    own = (profile.available_bytes, profile.host_free_bytes)
    available, host_free = (min(nbytes) for nbytes in zip(*gather_from_all_ranks(own), strict=True))
    preferences = gather_from_all_ranks(preference)
    source = preferences.index(max(preferences))
    chosen = gather_from_all_ranks(profile if dist.get_rank() == source else None)[source]
    assert chosen is not None
    return replace(chosen, available_bytes=available, host_free_bytes=host_free)


def broadcast_from_first_rank(make: Callable[[], T]) -> T:
    """Call `make` on the first rank. On every rank, return the result of this call, or raise its error."""
    if num_ranks() == 1:
        return make()
    if dist.get_rank() == 0:
        try:
            result = make()
        except Exception as error:
            dist.broadcast_object_list([None, _picklable_parts(error)], src=0)
            raise
        dist.broadcast_object_list([result, None], src=0)
        return result
    message: list[Any] = [None, None]
    dist.broadcast_object_list(message, src=0)
    if message[1] is not None:
        raise _rebuild_error(*message[1])
    return message[0]


def _picklable_parts(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """Return (class, arguments, attributes) of `error`, or of an AdaccError if these cannot be pickled. An error itself
    cannot be unpickled if its constructor's arguments differ from `args`, and the other ranks would wait forever."""
    parts = (type(error), error.args, vars(error))
    try:
        _rebuild_error(*pickle.loads(pickle.dumps(parts)))
    except Exception:
        return AdaccError, (f"the first rank failed with {type(error).__name__}: {error}",), {}
    return parts


def _rebuild_error(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error
