"""How a profile takes its readings: by running on the device, timing it and asking its allocator.

`profile_model` reads through one object of this class, so that a model without memory can be read too (fake_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.price.codec_gradient_error import GradientErrors
from adacc_hf.price.codec_selection import outliers_in
from adacc_hf.price.cost_model import Prices, errors_of, price_call, price_tape
from adacc_hf.price.timing import median_ms, seconds_at
from adacc_hf.tape.recorder import RngUse
from adacc_hf.tape.replay_check import verify
from adacc_hf.tape.tape import Tape
from adacc_hf.torch_glue.memory import (
    MemoryMeter,
    allocate_workspaces,
    available_bytes,
    backward,
    static_bytes,
)
from adacc_hf.torch_glue.rng_state import RandomStates


class Measurement:
    """Readings from real runs."""

    rng_use: type[RngUse] = RngUse
    """Finds out whether an operator draws random numbers."""
    records_other_sizes = True
    """Whether parts of the batch are run too, so that the model can train at any size."""
    watches_one_block = True
    """Whether at most one block retains what it makes while memory is measured."""

    def verify(self, tape: Tape, bases: list[torch.Tensor]) -> frozenset[int]:
        """The values of `tape` that replay recomputes bit for bit (rule R7)."""
        return verify(tape, bases)

    def outliers(self, tape: Tape, bases: list[torch.Tensor], config: AdaccConfig) -> dict[int, int]:
        """Outlier channels of each activation whose codec keeps them."""
        return outliers_in(tape, bases, config)

    def price(
        self,
        tape: Tape,
        bases: list[torch.Tensor],
        config: AdaccConfig,
        outliers: dict[int, int],
        run_block: Callable[[], object] | None = None,
    ) -> Prices:
        """The time of each operator of `tape`, and the codecs of each activation with theirs.

        `run_block` runs the block itself; None where it cannot be run again.
        """
        return price_tape(tape, bases, config, outliers, run_block)

    def gradient_errors(
        self, tape: Tape, bases: list[torch.Tensor], prices: Prices, config: AdaccConfig
    ) -> GradientErrors:
        """What codecs and replay do to the gradients of a block; `prices` get a finer codec where none is near."""
        return errors_of(tape, bases, prices, config)

    def price_call(self, run: Callable[[], object], device: torch.device) -> Prices:
        """The time of a call that runs more than its tape shows; `run` makes it again."""
        return price_call(run, device)

    def meter(self, device: torch.device) -> MemoryMeter:
        """A meter of live bytes on `device`."""
        return MemoryMeter.for_device(device)

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        """Have `call` called in backward once the gradient of `tensor` is there."""

        def hook(_: torch.Tensor) -> None:
            call()

        tensor.register_hook(hook)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from `loss`."""
        backward(loss)

    def seconds_at(self, device: torch.device) -> float:
        """The time once `device` has done all that it was given."""
        return seconds_at(device)

    def step_ms(self, model: nn.Module, batch: Mapping[str, Any], measured_ms: float) -> float:
        """Milliseconds of one forward and backward as the model stands, by the step whose memory was measured."""
        return measured_ms

    def head_times(self, find_losses: Callable[[], list[LossCall]]) -> dict[str, float]:
        """Milliseconds of the output layer and the loss, forward and backward, by the name of the head.

        `find_losses` runs a forward to find the losses of a step.
        """
        losses = find_losses()
        return {name: sum(self.head_ms(loss, compute) for loss in losses) for name, compute in PRICED_HEADS.items()}

    def head_ms(self, loss: LossCall, compute: Callable[[LossCall], torch.Tensor]) -> float:
        """Milliseconds of the output layer and one loss, which `compute` makes."""
        return head_ms(loss, compute)

    def static_bytes(self, model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> int:
        """Bytes live on the model's device before a step."""
        allocate_workspaces(next(model.parameters()).device)
        return static_bytes(model, batch, optimizer)

    def available_bytes(self, device: torch.device, static_bytes: int) -> int:
        """Bytes that this process can have on `device`."""
        return available_bytes(device, static_bytes)

    def random_states(self, devices: Iterable[torch.device]) -> RandomStates:
        """The states of the random generators of `devices` and of the CPU."""
        return RandomStates(devices)


HEAD_REPEATS = 3
"""A head is long beside the clock's noise, and the faster one is chosen: one interruption must not decide."""

# What a model's output layer and loss cost with whole logits and chunked, measured on one batch.


def head_ms(loss: LossCall, compute: Callable[[LossCall], Tensor]) -> float:
    """Milliseconds of forward and backward of one loss, made by `compute`: the median of HEAD_REPEATS.

    After one to warm up: a GPU loads a kernel when it is run first, and may choose among some.
    """
    return median_ms(lambda: _gradients(loss, compute), loss.rows.device, HEAD_REPEATS)


def _gradients(loss: LossCall, compute: Callable[[LossCall], Tensor]) -> tuple[Tensor, ...]:
    """The gradients that training needs of the layer, from copies that end where the layer starts."""
    copy = on_leaves(loss)
    with torch.enable_grad():
        value = compute(copy)
    leaves = (copy.rows, copy.call.weight, copy.call.bias)
    return torch.autograd.grad(value, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad])


def on_leaves(loss: LossCall) -> LossCall:
    """The same loss of tensors that end where the layer starts."""
    bias = loss.call.bias
    return loss.on(_leaf(loss.rows), _leaf(loss.call.weight), None if bias is None else _leaf(bias))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def whole_loss(loss: LossCall) -> Tensor:
    """The loss by way of whole logits."""
    dtype, bias = loss.call.dtype, loss.call.bias
    with torch.autocast(loss.rows.device.type, enabled=False):
        logits = F.linear(loss.rows.to(dtype), loss.call.weight.to(dtype), None if bias is None else bias.to(dtype))
        return F.cross_entropy(logits.float(), loss.target, ignore_index=loss.ignore_index, reduction=loss.reduction)


PRICED_HEADS = {"plain": whole_loss, "chunked": LossCall.chunked}
"""How each head makes a loss, by its name."""
