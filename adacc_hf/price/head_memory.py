"""Memory and time of both heads, from the losses of a micro-batch that trains with one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from adacc_hf.artifacts.profile import Head, Profile
from adacc_hf.head.head import ChunkedHead
from adacc_hf.head.lazy_logits import LossCall
from adacc_hf.price.measurement import PRICED_HEADS, Measurement, full_logits_loss
from adacc_hf.price.tile_memory import OperatorMarks
from adacc_hf.torch_glue.meters import MemoryMeter, MemoryPoint


class HeadMeter:
    """Meter of the losses of one micro-batch, computed in chunks, or from whole logits if `is_plain`."""

    def __init__(
        self,
        head: ChunkedHead,
        measurement: Measurement,
        aside: Callable[[], AbstractContextManager[MemoryMeter]],
        is_of_batch: Callable[[Tensor], bool],
        is_plain: bool,
    ) -> None:
        self._head, self._measurement, self._aside, self._is_of_batch = head, measurement, aside, is_of_batch
        self.is_plain = is_plain
        self.times: dict[str, float] = dict.fromkeys(PRICED_HEADS, 0.0)
        """Milliseconds of each head, forward and backward."""
        self._more = [0, 0, 0]
        """Additional bytes of whole logits compared with chunks: stored, and at the peaks of forward and backward."""
        self._before = head.num_losses, head.num_full_logits
        self._was_on, self._was_trial = head.is_on, head.is_trial
        head.is_on = head.is_trial = True
        head.computes_plainly = is_plain
        head.on_loss = self._note

    def close(self) -> None:
        """Stop reading losses."""
        head = self._head
        head.is_on, head.is_trial, head.on_loss, head.computes_plainly = self._was_on, self._was_trial, None, False

    @property
    def has_both(self) -> bool:
        """True if the model can have either head: no code but its losses has read the logits."""
        num_losses = self._head.num_losses - self._before[0]
        num_full_logits = self._head.num_full_logits - self._before[1]
        return num_losses > 0 and num_full_logits == (num_losses if self.is_plain else 0)

    def check(self) -> None:
        """Raise ChunkedHeadError unless the model can have the chunked head."""
        if not self.has_both:
            self._head.check_used()

    def with_both(self, profile: Profile) -> Profile:
        """Return `profile`, measured with the head that trained, with both heads, the plain one first."""
        own, other = tuple(self.times) if self.is_plain else tuple(self.times)[::-1]
        stored, forward, backward = (-more if self.is_plain else more for more in self._more)
        other_head = Head(
            name=other,
            ms=self.times[other],
            outside_stored_bytes=profile.outside_stored_bytes + stored,
            outside_peak_bytes=profile.outside_peak_bytes + forward,
            loss_peak_bytes=profile.loss_peak_bytes + backward,
        )
        profile = replace(profile, head=own, head_ms=self.times[own], other_heads=(other_head,))
        return profile.with_head("plain")

    def _note(self, loss: LossCall) -> None:
        num_rows = loss.rows.shape[0]
        larger, smaller = (loss.part(max(1, num_rows // share)) for share in self._measurement.head_shares)
        ratio = num_rows / larger.rows.shape[0]
        # The saved-tensor hooks around the model's forward must not see these losses.
        with self._aside(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            for name, compute in PRICED_HEADS.items():
                self.times[name] += ratio * self._measurement.head_ms(larger, compute)
            chunked = _bytes(self._moments(loss, LossCall.chunked))
            whole = _bytes(self._extrapolated(num_rows, larger, smaller))
        more = [plain - own for plain, own in zip(whole, chunked, strict=True)]
        # The layer keeps its input for backward, unless it casts the input, and the whole loss its target.
        kept_bytes = loss.rows.nbytes if loss.rows.dtype is loss.call.dtype else 0
        kept_bytes += 0 if self._is_of_batch(loss.target) else loss.target.untyped_storage().nbytes()
        stored, forward, backward = self._more
        at_peak = 0 if self.is_plain else kept_bytes
        self._more = [stored + more[0] + kept_bytes, max(forward, more[1]), max(backward, more[2] + at_peak)]

    def _extrapolated(self, num_rows: int, larger: LossCall, smaller: LossCall) -> list[MemoryPoint]:
        """Return the moments of a loss of whole logits of `num_rows` rows, whose bytes are linear in the rows, from
        those of two parts."""
        count, fewer = larger.rows.shape[0], smaller.rows.shape[0]
        slope = (num_rows - count) / max(1, count - fewer)

        def at(more: int, less: int) -> int:
            return int(more + slope * (more - less))

        parts = (self._moments(part, full_logits_loss) for part in (larger, smaller))
        return [
            MemoryPoint(more.label, at(more.live_bytes, less.live_bytes), at(more.max_bytes, less.max_bytes))
            for more, less in zip(*parts, strict=True)
        ]

    def _moments(self, loss: LossCall, compute: Callable[[LossCall], Tensor]) -> list[MemoryPoint]:
        """Return the live bytes between successive operators of a loss and its backward, which begins at "stored"."""
        with self._measurement.meter(loss.rows.device) as meter, OperatorMarks(meter):
            value = compute(loss.detached())
            meter.mark(("stored",))
            self._measurement.backward(value)
            del value
        return meter.points


def _bytes(moments: Sequence[MemoryPoint]) -> tuple[int, int, int]:
    """Return the bytes that a loss stores for backward, and its peaks in forward and backward."""
    start = next(number for number, point in enumerate(moments) if point.label == ("stored",))
    forward, backward = (max(point.max_bytes for point in part) for part in (moments[:start], moments[start:]))
    return moments[start].live_bytes, forward, backward
