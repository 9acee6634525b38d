"""Assembly of a profile from the recorded kinds of blocks and the memory of a measured step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import BlockProfile, Head, Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import StepLayout
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.training_step import TrainingStep


@dataclass(frozen=True, kw_only=True)
class StepBase:
    """The step around a profiled micro-batch."""

    model: nn.Module
    step: TrainingStep
    config: AdaccConfig
    measurement: Measurement
    base_bytes: int
    """Bytes live between steps without a batch: parameters, buffers, optimizer state, and other tensors on a GPU."""
    sizes: Shapes
    """Names and shapes of the micro-batch's tensors."""
    batch_bytes: int
    other_batches_bytes: int
    """Bytes of the step's other micro-batches and of prefetched batches."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Results of the runs in which memory and time are measured for a profile."""

    layouts: Mapping[str, StepLayout]
    """Memory of the step by head (output layer and loss). The first head is that of `Profile.head`."""
    step_ms: float
    """Milliseconds of a step in which every block is recomputed."""
    head_ms: Mapping[str, float]
    """Milliseconds of each head. Empty if there is only one head."""


def assemble(base: StepBase, recording: ModelRecording, readings: Readings) -> Profile:
    """Return the profile of a micro-batch, without blocks that were not recorded."""
    shared = recording.shared
    (head, step), *others = readings.layouts.items()
    resident_bytes = base.base_bytes + base.batch_bytes
    between_steps_bytes = resident_bytes + base.other_batches_bytes + base.step.optimizer_state_bytes
    static_bytes = between_steps_bytes + step.earlier_bytes
    replay_records = {index for kind in recording.kinds for index in kind.held}
    replay_bytes = sum(shared[index].nbytes for index in replay_records)
    saved_shared_bytes = sum(record.nbytes for record in shared if record.saved) + replay_bytes
    optimizer_bytes = step.gradient_bytes + base.step.optimizer_step_bytes
    host_link, host_free_bytes = base.measurement.host_link(base.device, base.config, base.model)
    names = [block.name for block in recording.blocks]

    def fields_of_head(layout: StepLayout) -> dict[str, Any]:
        """Return the fields of a profile that depend on the head (output layer and loss). `layout` is the memory of a
        step with this head."""
        return {
            "outside_stored_bytes": layout.outside_stored_bytes - saved_shared_bytes,
            "outside_peak_bytes": static_bytes + layout.outside_peak_bytes,
            "loss_peak_bytes": static_bytes + layout.loss_peak_bytes,
            "tail_peak_bytes": static_bytes + max(layout.tail_peak_bytes, layout.first_peak_bytes),
        }

    return Profile(
        model_class=type(base.model).__name__,
        kinds=tuple(replace(kind, host_link=host_link) for kind in recording.kinds),
        blocks=tuple(
            BlockProfile(
                name=block.name,
                kind=block.kind,
                forward_base_bytes=static_bytes + step.forward_bases[block.name],
                backward_base_bytes=static_bytes + step.bases[block.name],
            )
            for block in recording.blocks
        ),
        shared=shared,
        static_bytes=static_bytes,
        outside_live_bytes=sum(shared[index].nbytes for index in replay_records & recording.freed_shared),
        available_bytes=base.measurement.available_bytes(base.device, resident_bytes),
        host_free_bytes=host_free_bytes,
        step_ms=readings.step_ms,
        device=str(base.device),
        optimizer_peak_bytes=0 if base.step.optimizer is None else between_steps_bytes + optimizer_bytes,
        head=head,
        head_ms=readings.head_ms.get(head, 0.0),
        other_heads=tuple(
            Head(
                name=name,
                ms=readings.head_ms[name],
                backward_base_bytes=tuple(static_bytes + layout.bases[block] for block in names),
                **fields_of_head(layout),
            )
            for name, layout in others
        ),
        measured=((base.sizes, ()),),
        **fields_of_head(step),
    )
