"""What training holds besides activations, on each of N devices: parameters, gradients, optimizer state, buffers.

How precisions are taken, as Trainer and accelerate do it:

- fp32, bf16: parameters, gradients and optimizer state are all of that dtype.
- bf16-amp, fp16-amp: float32 parameters, gradients and state, and autocast; there are no separate master weights.
- bf16-amp and fp16-amp with --zero: DeepSpeed's own mixed precision: 16-bit parameters and gradients, and float32
  master weights that are part of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from adacc_hf.torch_glue.memory import distinct_bytes

FLOAT32_BYTES = 4
_INT8_MIN_ELEMENTS = 4096
"""bitsandbytes keeps the state of smaller parameters in float32."""
_INT8_BLOCK = 256
"""Elements of 8-bit state that share one float32 scale."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How many devices train, and what each holds a part of only."""

    method: str = "none"
    """none, ddp, fsdp, zero1, zero2 or zero3."""
    num_devices: int = 1

    def __post_init__(self) -> None:
        if self.method != "none" and self.num_devices < 2:
            raise ValueError(
                f"--{self.method} with {self.num_devices} devices shares nothing: give at least 2, or leave it out"
            )

    def parts(self, what: str) -> int:
        """How many parts "parameters", "gradients" or "optimizer" are cut into."""
        cut = {
            "optimizer": ("fsdp", "zero1", "zero2", "zero3"),
            "gradients": ("fsdp", "zero2", "zero3"),
            "parameters": ("fsdp", "zero3"),
        }
        return self.num_devices if self.method in cut[what] else 1

    @property
    def is_deepspeed(self) -> bool:
        return self.method.startswith("zero")

    @property
    def casts_weights(self) -> bool:
        """Whether mixed precision computes with 16-bit weights made from float32 ones: Accelerate's FSDP gathers in 16
        bits, DeepSpeed keeps both. Else autocast casts weights as they are used."""
        return self.is_deepspeed or self.method == "fsdp"


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """Bytes on one device that do not depend on the batch."""

    parameters_bytes: int
    gradients_bytes: int
    """All gradients, as they are when backward ends."""
    optimizer_bytes: int
    """State, and the float32 weights that DeepSpeed keeps beside 16-bit ones."""
    buffers_bytes: int
    unsharded_bytes: int
    """Parameters that are whole while they are used: those outside the blocks, one block at work and one fetched."""
    buckets_bytes: int
    """DDP's buckets, a second copy of the gradients."""
    update_bytes: int
    """Temporaries of the optimizer's step."""

    @property
    def resting_bytes(self) -> int:
        """What is there all the time."""
        return (
            self.parameters_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
            + self.unsharded_bytes
            + self.buckets_bytes
        )

    @property
    def update_peak_bytes(self) -> int:
        """Live bytes in the optimizer's step."""
        return self.resting_bytes - self.unsharded_bytes + self.gradients_bytes + self.update_bytes


@dataclass(frozen=True)
class _Optimizer:
    state_bytes: Callable[[torch.Tensor], int]
    update_bytes: Callable[[Sequence[torch.Tensor]], int]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _int8_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() < _INT8_MIN_ELEMENTS:
        return FLOAT32_BYTES * tensor.numel()
    return tensor.numel() + FLOAT32_BYTES * -(-tensor.numel() // _INT8_BLOCK)


def _factored_bytes(tensor: torch.Tensor) -> int:
    """One mean per row and one per column in place of one per element."""
    if tensor.dim() < 2:
        return FLOAT32_BYTES * tensor.numel()
    rows, columns = tensor.shape[:-1].numel(), (*tensor.shape[:-2], tensor.shape[-1])
    return FLOAT32_BYTES * (rows + torch.Size(columns).numel())


def _no_bytes(_: Sequence[torch.Tensor]) -> int:
    return 0


COMPACT = "compact"
_OPTIMIZERS = {
    "adamw": _Optimizer(lambda p: 2 * _nbytes(p), _no_bytes),
    "adamw_foreach": _Optimizer(lambda p: 2 * _nbytes(p), lambda ps: sum(map(_nbytes, ps))),
    "adamw_8bit": _Optimizer(lambda p: 2 * _int8_bytes(p), _no_bytes),
    "lion": _Optimizer(_nbytes, _no_bytes),
    "lion_8bit": _Optimizer(_int8_bytes, _no_bytes),
    "adafactor": _Optimizer(_factored_bytes, lambda ps: 2 * FLOAT32_BYTES * max((p.numel() for p in ps), default=0)),
    COMPACT: _Optimizer(lambda p: 2 * _nbytes(p), lambda ps: 2 * sum(map(_nbytes, ps))),
    "sgd": _Optimizer(lambda p: 0, _no_bytes),
    "sgd_momentum": _Optimizer(_nbytes, _no_bytes),
}
"""State per parameter, and temporaries of one step. adamw is torch's fused one, Trainer's default, which makes none;
adamw_foreach takes the root of every second moment at once, as compact does of the cores that it trains in the
place of weights, and which have memory in its step alone; adafactor squares and scales one gradient at a time."""

OPTIMIZERS = tuple(_OPTIMIZERS)


def check_optimizer(name: str) -> None:
    """Raise ValueError for an optimizer that is not known."""
    if name not in _OPTIMIZERS:
        raise ValueError(f"--optimizer={name} is not known: choose from {', '.join(OPTIMIZERS)}")


def state_bytes(name: str, parameter: torch.Tensor) -> int:
    """What the optimizer called `name` keeps for `parameter`. Raises ValueError for one that is not known."""
    check_optimizer(name)
    return _OPTIMIZERS[name].state_bytes(parameter)


def update_bytes(name: str, parameters: Sequence[torch.Tensor]) -> int:
    """Temporaries of one step of that optimizer on `parameters`. Raises as `state_bytes`."""
    check_optimizer(name)
    return _OPTIMIZERS[name].update_bytes(parameters)


def static_memory(
    model: nn.Module, blocks: Sequence[nn.Module], optimizer: str, sharding: Sharding, master_weights: bool
) -> StaticMemory:
    """What training `model` holds on each device.

    With `master_weights` the parameters of `model` are 16-bit copies of float32 ones: DeepSpeed keeps both, FSDP makes
    the copies of what is in use, and has float32 gradients too. The model may be on meta, or fake. Raises ValueError
    for an optimizer that is not known.
    """
    check_optimizer(optimizer)
    rule = _OPTIMIZERS[optimizer]
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # A core of CompAct's is one number between steps, which all of its elements are.
    held = [parameter for parameter in parameters if parameter.untyped_storage().nbytes() >= _nbytes(parameter)]
    updated = _float32(trained) if master_weights else trained
    state = sum(map(rule.state_bytes, updated))
    masters = sum(map(_nbytes, updated)) if master_weights and sharding.is_deepspeed else 0
    is_float32 = master_weights and not sharding.is_deepspeed
    gradients = sum(map(_nbytes, updated if is_float32 else trained))
    return StaticMemory(
        parameters_bytes=_part(sum(map(_nbytes, _float32(held) if is_float32 else held)), sharding.parts("parameters")),
        gradients_bytes=_part(gradients, sharding.parts("gradients")),
        optimizer_bytes=_part(state + masters, sharding.parts("optimizer")),
        buffers_bytes=distinct_bytes(model.buffers()),
        unsharded_bytes=_unsharded_bytes(parameters, blocks) if sharding.parts("parameters") > 1 else 0,
        buckets_bytes=gradients if sharding.method == "ddp" else 0,
        update_bytes=_part(rule.update_bytes(updated), sharding.parts("optimizer")),
    )


def _float32(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same shapes in float32, without memory."""
    return [torch.empty_like(tensor, dtype=torch.float32, device="meta") for tensor in tensors]


def _unsharded_bytes(parameters: Sequence[torch.Tensor], blocks: Sequence[nn.Module]) -> int:
    sizes = sorted(distinct_bytes(block.parameters()) for block in blocks)
    return distinct_bytes(parameters) - sum(sizes) + sum(sizes[-2:])


def _part(nbytes: int, parts: int) -> int:
    return -(-nbytes // parts)
