"""Chunked output layer: the layer returns lazy logits (without memory), and the loss is computed in chunks from them.

Only training steps with gradients enabled are chunked. Chunked and plain results are equal except for rounding, because
sums are added in a different order. `remove` restores the layer completely.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adacc_hf.artifacts.errors import ChunkedHeadError
from adacc_hf.head.lazy_logits import HeadCall, LazyLogits, LossCall, product_dtype
from adacc_hf.torch_glue.zero3 import is_partitioned

log = logging.getLogger(__name__)

_NEXT_STEP = 'train with AdaccConfig(head="plain") or "auto"'


class ChunkedHead:
    """Output layer of `model`, made to return lazy logits, which take no memory, until `remove()` is called. The loss
    of lazy logits is computed in chunks. Raises ChunkedHeadError, with the reason, if the model has no output layer
    that can be chunked."""

    def __init__(self, model: nn.Module) -> None:
        self.is_on = True
        """True while the layer returns lazy logits (without memory). If False, the layer runs plainly."""
        self.computes_plainly = False
        """True if losses are computed from whole logits, as by the plain head, and only noted."""
        self.is_trial = False
        """True during a trial run that tests if the head can be chunked. No warning is logged then."""
        self.num_losses = 0
        """Number of losses that were computed in chunks."""
        self.num_full_logits = 0
        """Number of times that the full logits were computed, because code other than the loss read the logits."""
        self.on_loss: Callable[[LossCall], None] | None = None
        """Callback for each loss that is computed in chunks, or None."""
        self._layer: nn.Linear | None = output_layer(model)
        self._layer.__dict__["forward"] = HeadForward(self, self._layer)

    def remove(self) -> None:
        """Restore the output layer's own forward. Further calls have no effect."""
        if self._layer is not None:
            self._layer.__dict__.pop("forward", None)
        self._layer = None

    def check_used(self) -> None:
        """Raise ChunkedHeadError unless the model has computed a loss in chunks, and never the full logits."""
        if self.num_full_logits or not self.num_losses:
            raise ChunkedHeadError(
                f"the model computes something else from its logits than a cross entropy: {_NEXT_STEP}"
            )

    def note_loss(self, loss: LossCall) -> None:
        """Handle a loss that is computed in chunks: increment `num_losses`, and call `on_loss`."""
        self.num_losses += 1
        if self.on_loss is not None:
            self.on_loss(loss)

    def note_full_logits(self) -> None:
        """Count a computation of the full logits, and log a warning at the first one in training."""
        self.num_full_logits += 1
        if self.num_full_logits == 1 and self.num_losses and not self.is_trial:
            log.warning(
                "Adacc: code other than the loss reads the logits of the chunked head, so the full logits are computed "
                "in the memory that the chunked head saves. If every step reads the logits, set "
                'AdaccConfig(head="plain")'
            )


class HeadForward:
    """Callable that replaces an output layer's forward, and returns lazy logits (without memory) in training. A copied
    or pickled layer runs its original forward."""

    def __init__(self, head: ChunkedHead | None, layer: nn.Linear) -> None:
        self.head = head
        self.layer = layer

    def __call__(self, input: Tensor) -> Tensor:  # the parameter name of nn.Linear.forward
        if self.head is None or not self.head.is_on or not _can_defer(self.layer, input):
            return type(self.layer).forward(self.layer, input)
        dtype = product_dtype(self.layer.weight)
        return LazyLogits.of(HeadCall(input, self.layer.weight, self.layer.bias, dtype, self.head))

    def __reduce__(self) -> tuple[object, ...]:
        return HeadForward, (None, self.layer)


def _can_defer(layer: nn.Linear, rows: Tensor) -> bool:
    """Return True if `layer` can return logits without memory, to be computed later, for the input `rows`."""
    if not layer.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    # If the input does not fit the layer, let the layer's own forward raise its error.
    fits = rows.dim() > 1 and rows.shape[-1] == layer.in_features and rows.device == layer.weight.device
    fits = fits and product_dtype(rows) == product_dtype(layer.weight)
    return fits and (rows.requires_grad or layer.weight.requires_grad)


def output_layer(model: nn.Module) -> nn.Linear:
    """Return the output layer of a language model. Raise ChunkedHeadError if the layer is absent or not supported."""
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    layer = get_output_embeddings() if get_output_embeddings is not None else None
    if layer is None:
        raise ChunkedHeadError(
            f"{type(model).__name__} has no output layer (get_output_embeddings) that could be chunked: {_NEXT_STEP}"
        )
    # A subclass may compute anything. FSDP's subclass frees its weight before the loss is computed.
    if type(layer) is not nn.Linear:
        raise ChunkedHeadError(
            f"the output layer is a {type(layer).__name__}, not a plain nn.Linear: its head is plain"
        )
    if is_partitioned(layer.weight):
        raise ChunkedHeadError(
            "the output layer has its weight only during its forward (ZeRO 3), and not when the loss is computed: its "
            "head is plain"
        )
    if "forward" in layer.__dict__:
        raise ChunkedHeadError(f"the forward of the output layer was replaced by other code: {_NEXT_STEP}")
    return layer
