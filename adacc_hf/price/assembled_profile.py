"""Assembly of a profile from the recorded kinds of blocks and the memory of a measured step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import BlockProfile, Head, Profile
from adacc_hf.artifacts.size_model import Shapes
from adacc_hf.price.batch import TrainingStep
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import StepLayout
from adacc_hf.price.model_recording import ModelRecording


def assemble(
    model: nn.Module,
    recording: ModelRecording,
    layouts: Mapping[str, StepLayout],
    head_ms: Mapping[str, float],
    *,
    step: TrainingStep,
    config: AdaccConfig,
    measurement: Measurement,
    resident_bytes: int,
    sizes: Shapes,
    batch_bytes: int,
) -> Profile:
    """Return the profile of a micro-batch of `step`, without blocks that were not recorded.

    `layouts` contains the step's memory by head, the profile's head first, and `head_ms` the heads' times, or nothing
    for a single head. `resident_bytes` are live between steps, with one micro-batch of `sizes` and `batch_bytes`.
    """
    shared, device = recording.shared, next(model.parameters()).device
    (head, own), *others = layouts.items()
    between_steps_bytes = resident_bytes + step.other_batches_bytes(batch_bytes) + step.optimizer_state_bytes
    static_bytes = between_steps_bytes + own.earlier_bytes
    replay_records = {index for kind in recording.kinds for index in kind.held}
    replay_bytes = sum(shared[index].nbytes for index in replay_records)
    saved_shared_bytes = sum(record.nbytes for record in shared if record.saved) + replay_bytes
    optimizer_bytes = own.gradient_bytes + step.optimizer_step_bytes
    host_link, host_free_bytes = measurement.host_link(device, config, model)
    names = [block.name for block in recording.blocks]

    def fields_of_head(layout: StepLayout) -> dict[str, Any]:
        """Return the fields of a profile that depend on the head, for the memory `layout` of a step."""
        return {
            "outside_stored_bytes": layout.outside_stored_bytes - saved_shared_bytes,
            "outside_peak_bytes": static_bytes + layout.outside_peak_bytes,
            "loss_peak_bytes": static_bytes + layout.loss_peak_bytes,
            "tail_peak_bytes": static_bytes + max(layout.tail_peak_bytes, layout.first_peak_bytes),
        }

    return Profile(
        model_class=type(model).__name__,
        kinds=tuple(replace(kind, host_link=host_link) for kind in recording.kinds),
        blocks=tuple(
            BlockProfile(
                name=block.name,
                kind=block.kind,
                forward_base_bytes=static_bytes + own.forward_bases[block.name],
                backward_base_bytes=static_bytes + own.bases[block.name],
            )
            for block in recording.blocks
        ),
        shared=shared,
        static_bytes=static_bytes,
        outside_live_bytes=sum(shared[index].nbytes for index in replay_records & recording.freed_shared),
        available_bytes=measurement.available_bytes(model, step.optimizer),
        host_free_bytes=host_free_bytes,
        step_ms=own.ms,
        device=str(device),
        optimizer_peak_bytes=0 if step.optimizer is None else between_steps_bytes + optimizer_bytes,
        head=head,
        head_ms=head_ms.get(head, 0.0),
        other_heads=tuple(
            Head(
                name=name,
                ms=head_ms[name],
                backward_base_bytes=tuple(static_bytes + layout.bases[block] for block in names),
                **fields_of_head(layout),
            )
            for name, layout in others
        ),
        measured=((sizes, ()),),
        **fields_of_head(own),
    )
