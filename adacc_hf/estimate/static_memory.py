"""Static memory of training on each of N devices: parameters, gradients, optimizer state and buffers.

The module imports torch only to compute sizes. Wrong options are therefore refused before torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

FLOAT32_BYTES = 4
_INT8_MIN_ELEMENTS = 4096
"""Minimum number of elements of a parameter for 8-bit optimizer state. For smaller parameters, bitsandbytes keeps the
state in float32."""
_INT8_BLOCK = 256
"""Number of elements of 8-bit optimizer state that share one float32 scale."""
_REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default `reduce_bucket_size` (runtime/zero/config.py of 0.19). A bucket holds this number of elements
whatever the model's size."""
_NUM_BACKWARD_BUCKETS = 2
"""Number of gradient buckets of ZeRO-1 and ZeRO-2 with `overlap_comm`, which the guides of Transformers and Accelerate
set. By default, DeepSpeed does not set `overlap_comm` for these stages, and uses one bucket (`setup_buckets` in
runtime/zero/stage_1_and_2.py)."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of the weights and of autocast, by name. `autocast` is None if autocast is off."""

    weights: str
    autocast: str | None

    @property
    def compute(self) -> str:
        return self.autocast or self.weights


PRECISIONS = {
    "fp32": Precision("float32", None),
    "bf16": Precision("bfloat16", None),
    "bf16-amp": Precision("float32", "bfloat16"),
    "bf16-weights-amp": Precision("bfloat16", "bfloat16"),
    "fp16-amp": Precision("float32", "float16"),
}
"""Dtypes by the names that the command line accepts, the same as with the Trainer and Accelerate. Gradients and
optimizer state have the dtype of the weights. With --zero, autocast stands for DeepSpeed's own mixed precision:
parameters and gradients are stored in 16 bits, and the optimizer's state includes float32 master weights."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Method of parallel training, and the number of devices."""

    method: str = "none"
    """Name of the method: none, ddp, fsdp, zero1, zero2 or zero3."""
    num_devices: int = 1

    def __post_init__(self) -> None:
        if self.method != "none" and self.num_devices < 2:
            raise ValueError(
                f"--{self.method} needs at least 2 devices, not {self.num_devices}: pass more devices, or leave out "
                f"--{self.method}"
            )

    def num_shards(self, state: str) -> int:
        """Return the number of shards of `state`: "parameters", "gradients" or "optimizer". Return 1 if not sharded."""
        sharding_methods = {
            "optimizer": ("fsdp", "zero1", "zero2", "zero3"),
            "gradients": ("fsdp", "zero2", "zero3"),
            "parameters": ("fsdp", "zero3"),
        }
        return self.num_devices if self.method in sharding_methods[state] else 1

    @property
    def is_deepspeed(self) -> bool:
        return self.method.startswith("zero")

    @property
    def num_reduce_buckets(self) -> int:
        """Number of buckets in which DeepSpeed reduces gradients, or 0 for other methods of parallel training."""
        return {"zero1": _NUM_BACKWARD_BUCKETS, "zero2": _NUM_BACKWARD_BUCKETS, "zero3": 1}.get(self.method, 0)

    @property
    def casts_weights(self) -> bool:
        """True if mixed precision computes with 16-bit copies of float32 weights.

        Accelerate's FSDP gathers 16-bit copies. DeepSpeed keeps the float32 weights and the 16-bit copies. With other
        methods of parallel training, autocast casts weights at each use.
        """
        return self.is_deepspeed or self.method == "fsdp"


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """Memory of training on one device that does not depend on the batch."""

    parameters_bytes: int
    gradients_bytes: int
    """Bytes of all gradients at the end of backward."""
    optimizer_bytes: int
    """Bytes of the optimizer's state, including DeepSpeed's float32 master weights."""
    buffers_bytes: int
    unsharded_bytes: int
    """Bytes of the parameters that are gathered at the same time: the parameters outside the blocks, of the running
    block, and of one prefetched block. 0 if parameters are not sharded."""
    buckets_bytes: int
    """Bytes of the gradient buckets that are never freed. DDP's buckets are a second copy of the gradients. ZeRO-3 uses
    one bucket."""
    backward_buckets_bytes: int
    """Bytes of the gradient buckets of ZeRO-1 and ZeRO-2, which are freed before the optimizer's step."""
    update_bytes: int
    """Bytes of the temporaries in the optimizer's step."""

    @property
    def resting_bytes(self) -> int:
        """Bytes that stay allocated during forward and backward. Buckets that exist only in backward are included."""
        return (
            self.parameters_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
            + self.unsharded_bytes
            + self.buckets_bytes
            + self.backward_buckets_bytes
        )

    @property
    def update_peak_bytes(self) -> int:
        """Peak of live bytes in the optimizer's step."""
        freed_bytes = self.unsharded_bytes + self.backward_buckets_bytes
        return self.resting_bytes - freed_bytes + self.gradients_bytes + self.update_bytes


def _state_nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _int8_state_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() < _INT8_MIN_ELEMENTS:
        return FLOAT32_BYTES * tensor.numel()
    return tensor.numel() + FLOAT32_BYTES * -(-tensor.numel() // _INT8_BLOCK)


def _factored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of Adafactor's second moments for a parameter: one mean per row and one mean per column."""
    if tensor.dim() < 2:
        return FLOAT32_BYTES * tensor.numel()
    rows, columns = math.prod(tensor.shape[:-1]), math.prod((*tensor.shape[:-2], tensor.shape[-1]))
    return FLOAT32_BYTES * (rows + columns)


COMPACT = "compact"
_OPTIMIZERS: dict[str, tuple[Callable[[torch.Tensor], int], Callable[[Sequence[torch.Tensor]], int]]] = {
    "adamw": (lambda p: 2 * _state_nbytes(p), lambda ps: 0),
    "adamw_foreach": (lambda p: 2 * _state_nbytes(p), lambda ps: sum(map(_state_nbytes, ps))),
    "adamw_8bit": (lambda p: 2 * _int8_state_bytes(p), lambda ps: 0),
    "lion": (_state_nbytes, lambda ps: 0),
    "lion_8bit": (_int8_state_bytes, lambda ps: 0),
    "adafactor": (_factored_bytes, lambda ps: 2 * FLOAT32_BYTES * max((p.numel() for p in ps), default=0)),
    COMPACT: (lambda p: 2 * _state_nbytes(p), lambda ps: 2 * sum(map(_state_nbytes, ps))),
    "sgd": (lambda p: 0, lambda ps: 0),
    "sgd_momentum": (_state_nbytes, lambda ps: 0),
}
"""Functions for each optimizer: bytes of the state of a parameter, and of the temporaries of a step on all parameters.

- adamw is torch's fused AdamW, the Trainer's default, which needs no temporaries.
- adamw_foreach allocates the square roots of all second moments at once.
- compact is CompAct, which trains small `core` parameters instead of weights. Its step allocates the cores, and the
  square roots of the cores' second moments.
- adafactor squares and scales one gradient at a time."""

OPTIMIZERS = tuple(_OPTIMIZERS)


def check_optimizer(name: str) -> None:
    """Raise ValueError if `name` is not in OPTIMIZERS."""
    if name not in _OPTIMIZERS:
        raise ValueError(f"--optimizer={name} is not known: choose from {', '.join(OPTIMIZERS)}")


def static_memory(
    model: nn.Module, blocks: Sequence[nn.Module], optimizer: str, sharding: Sharding, master_weights: bool
) -> StaticMemory:
    """Return the memory of training `model` on each device that does not depend on the batch.

    If `master_weights`, the parameters of `model` are 16-bit copies of float32 weights. DeepSpeed keeps the float32
    weights and the 16-bit copies. FSDP keeps float32 weights and gradients, and gathers 16-bit copies of the layers in
    use. The model may be on meta, or fake. Raises ValueError if `optimizer` is unknown.
    """
    from adacc_hf.torch_glue.memory import distinct_bytes

    check_optimizer(optimizer)
    state_bytes, update_bytes = _OPTIMIZERS[optimizer]
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # CompAct's cores are left out: between steps a core is a single number, expanded to the core's shape.
    allocated = [
        parameter for parameter in parameters if parameter.untyped_storage().nbytes() >= _state_nbytes(parameter)
    ]
    updated = _float32_on_meta(trained) if master_weights else trained
    state = sum(map(state_bytes, updated))
    masters = sum(map(_state_nbytes, updated)) if master_weights and sharding.is_deepspeed else 0
    is_float32 = master_weights and not sharding.is_deepspeed
    weights = sum(map(_state_nbytes, _float32_on_meta(allocated) if is_float32 else allocated))
    gradients = sum(map(_state_nbytes, updated if is_float32 else trained))
    bucket_bytes = _REDUCE_BUCKET_ELEMENTS * trained[0].dtype.itemsize if trained else 0
    reduce_bytes = sharding.num_reduce_buckets * bucket_bytes
    return StaticMemory(
        parameters_bytes=_shard_bytes(weights, sharding.num_shards("parameters")),
        gradients_bytes=_shard_bytes(gradients, sharding.num_shards("gradients")),
        optimizer_bytes=_shard_bytes(state + masters, sharding.num_shards("optimizer")),
        buffers_bytes=distinct_bytes(model.buffers()),
        unsharded_bytes=_unsharded_bytes(parameters, blocks) if sharding.num_shards("parameters") > 1 else 0,
        buckets_bytes=gradients if sharding.method == "ddp" else reduce_bytes if sharding.method == "zero3" else 0,
        backward_buckets_bytes=0 if sharding.method == "zero3" else reduce_bytes,
        update_bytes=_shard_bytes(update_bytes(updated), sharding.num_shards("optimizer")),
    )


def _float32_on_meta(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    return [torch.empty_like(tensor, dtype=torch.float32, device="meta") for tensor in tensors]


def _unsharded_bytes(parameters: Sequence[torch.Tensor], blocks: Sequence[nn.Module]) -> int:
    """Return the bytes of the parameters that are gathered at the same time when parameters are sharded. These are all
    parameters outside the blocks, and the parameters of the two largest blocks."""
    from adacc_hf.torch_glue.memory import distinct_bytes

    sizes = sorted(distinct_bytes(block.parameters()) for block in blocks)
    return distinct_bytes(parameters) - sum(sizes) + sum(sizes[-2:])


def _shard_bytes(nbytes: int, num_shards: int) -> int:
    return -(-nbytes // num_shards)
