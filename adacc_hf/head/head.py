"""A model's output layer made chunked, with a loss that does without whole logits; taken off without a trace.

Only a training step with gradients on is chunked. What is computed is the same but for the order of sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.lazy_logits import HeadCall, LazyLogits, LossCall, product_dtype

log = logging.getLogger(__name__)

_NEXT_STEP = 'train with AdaccConfig(head="plain") or "auto"'


class ChunkedHead:
    """The output layer of `model`, chunked from now until `remove()`.

    Raises ChunkedHeadError, with the reason, if the model has no output layer that can be chunked.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_on = True
        """Set to False, the layer runs plainly."""
        self.is_tried = False
        """Set to True, nobody is warned: whether it is of use is only being found out."""
        self.num_losses = 0
        """Losses that were computed chunk by chunk."""
        self.num_whole = 0
        """Times that something besides the loss asked for the logits."""
        self.on_loss: Callable[[LossCall], None] | None = None
        """Told of each loss, if set."""
        self._layer: nn.Linear | None = output_layer(model)
        self._layer.__dict__["forward"] = HeadForward(self, self._layer)

    def remove(self) -> None:
        """Leave the layer as it was. Harmless when called again."""
        if self._layer is not None:
            self._layer.__dict__.pop("forward", None)
        self._layer = None

    def check_used(self) -> None:
        """Raise ChunkedHeadError unless all that was done with the logits so far were losses."""
        if self.num_whole or not self.num_losses:
            raise ChunkedHeadError(
                f"the model computes something else from its logits than a cross entropy: {_NEXT_STEP}"
            )

    def note_loss(self, loss: LossCall) -> None:
        self.num_losses += 1
        if self.on_loss is not None:
            self.on_loss(loss)

    def note_whole(self) -> None:
        self.num_whole += 1
        if self.num_whole == 1 and self.num_losses and not self.is_tried:
            log.warning(
                "Adacc: something besides the loss reads the logits, so they are made as a whole after all, which "
                'takes the memory that the chunked head saves; if every step does so, set AdaccConfig(head="plain")'
            )


class HeadForward:
    """Stands for the forward of an output layer. A copy, and what is pickled, runs plainly."""

    def __init__(self, head: ChunkedHead | None, layer: nn.Linear) -> None:
        self.head = head
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:  # named as nn.Linear names it
        if self.head is None or not self.head.is_on or not _can_defer(self.layer, input):
            return type(self.layer).forward(self.layer, input)
        dtype = product_dtype(self.layer.weight)
        return LazyLogits.of(HeadCall(input, self.layer.weight, self.layer.bias, dtype, self.head))

    def __reduce__(self) -> tuple[object, ...]:
        return HeadForward, (None, self.layer)


def _can_defer(layer: nn.Linear, rows: Tensor) -> bool:
    if not layer.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    # Where the layer would refuse its input, it shall say so itself.
    fits = rows.dim() > 1 and rows.shape[-1] == layer.in_features and rows.device == layer.weight.device
    fits = fits and product_dtype(rows) == product_dtype(layer.weight)
    return fits and (rows.requires_grad or layer.weight.requires_grad)


def output_layer(model: nn.Module) -> nn.Linear:
    """The output layer of a language model. Raises ChunkedHeadError if there is none, or none that can be chunked."""
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else None
    if layer is None:
        raise ChunkedHeadError(
            f"{type(model).__name__} has no output layer (get_output_embeddings) that could be chunked: {_NEXT_STEP}"
        )
    # A subclass may compute anything; FSDP's frees its weight before the loss is computed.
    if type(layer) is not nn.Linear:
        raise ChunkedHeadError(
            f"the output layer is a {type(layer).__name__}, not a plain nn.Linear: its head is plain"
        )
    if hasattr(layer.weight, "ds_id"):  # DeepSpeed's mark of the parameters that it divides, the same on all ranks
        raise ChunkedHeadError(
            "the output layer has its weight during its forward only (ZeRO 3), not when the loss is computed: its head "
            "is plain"
        )
    if "forward" in layer.__dict__:
        raise ChunkedHeadError(f"the forward of the output layer was replaced by something else: {_NEXT_STEP}")
    return layer
