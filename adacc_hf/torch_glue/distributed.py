"""Communication between the ranks of a distributed run. If there is only one process, no function communicates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from adacc_hf.artifacts.errors import AdaccError, RankFailedError
from adacc_hf.torch_glue.private import LOCAL_TENSOR, SHARDED_SIZE, active_ddp_module, whole_gradients

if TYPE_CHECKING:
    from torch import nn

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


def bucket_bytes() -> int:
    """Return the bytes of the gradient buckets of the DistributedDataParallel module whose forward is running, or 0
    without one. Buckets of which the gradients are views are counted with the gradients, if there are any."""
    ddp = active_ddp_module()
    trained = [] if ddp is None else [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    if trained and ddp.gradient_as_bucket_view and any(parameter.grad is not None for parameter in trained):
        return 0
    return sum(parameter.nbytes for parameter in trained)


class OutOfMemoryOnRankError(torch.OutOfMemoryError):
    """Error raised on all ranks if any rank ran out of memory."""


@contextmanager
def fail_together() -> Iterator[None]:
    """Make all ranks raise an error at the end of the `with` block if the block has failed on any rank, for which the
    others could wait forever.

    If memory runs out on any rank, raise OutOfMemoryOnRankError on all. Otherwise, the other ranks raise the first
    AdaccError too, and RankFailedError for any other error. All ranks must enter the `with` block, and the block must
    not contain a collective.
    """
    if num_ranks() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as exception:
        error = exception
    text = f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}"
    sent = error if error is None or isinstance(error, AdaccError) else RankFailedError(text)
    failures = gather_from_all_ranks((sent, isinstance(error, torch.OutOfMemoryError)))
    for failure, is_oom in failures:
        if is_oom:
            raise OutOfMemoryOnRankError(str(failure)) from error
    first = next((failure for failure, _ in failures if failure is not None), None)
    if first is not None:
        raise error or first


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
    """Call `make` on the first rank. On every rank, return the result of this call, or raise its error
    (`fail_together`)."""
    result: Any = None
    with fail_together():
        if is_first_rank():
            result = make()
    return gather_from_all_ranks(result)[0]
