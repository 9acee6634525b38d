"""The profile of a batch, measured in a few passes.

One forward records every block's operators, verifies that they can be replayed, and measures times, codec costs, and
the memory of each kind of block (blocks of one kind run the same operators). A forward and backward, in which all
blocks are recomputed, measures the memory of the rest of the step. If the model can have a chunked head, another
forward and backward measures the step with this head.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import BlockProfile, Head, Profile
from adacc_hf.artifacts.size_model import profile_structure, size_dependent_numbers
from adacc_hf.price.batch_subsampling import (
    Batch,
    extra_parts,
    is_encoder_decoder,
    profiled_parts,
)
from adacc_hf.price.idle_blocks import with_idle_blocks
from adacc_hf.price.measurement import Measurement, MemoryOnlyMeasurement
from adacc_hf.price.memory_profile import StepLayout, measure_step, with_step
from adacc_hf.price.model_recorder import record_model
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.profiled_model import ProfiledModel, profiled_model
from adacc_hf.price.tiled_kinds import with_tiled_kinds
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.tape.tape_cache import TapeCache, profiled_tapes
from adacc_hf.torch_glue.distributed import is_sharded

log = logging.getLogger(__name__)


def measure_profile(
    model: nn.Module,
    batch: Batch,
    config: AdaccConfig,
    step: TrainingStep,
    measurement: Measurement,
    all_sizes: bool = False,
) -> Profile:
    """Profile `batch` with the times and bytes that `measurement` reads. Raises the errors of `profile_model`.

    If `all_sizes` is True, also measure parts of the batch, so that the profile predicts other sizes.
    """
    with profiled_model(model, batch, config, step, measurement) as profiled:
        recording = record_model(profiled, batch)
        profile = _measure(profiled, batch, recording)
        if all_sizes:
            profile = _with_other_sizes(profile, profiled, batch, recording.tape_cache)
        profiled_tapes(model).take(recording.tape_cache)
        return profile


def _with_other_sizes(profile: Profile, profiled: ProfiledModel, batch: Batch, tape_cache: TapeCache) -> Profile:
    """Return a copy of `profile` that can predict other batch sizes, from measurements on parts of `batch`.

    The measurements end if the model rejects a part.
    """
    model = profiled.installation.model
    if is_sharded(model):  # a forward that fails midway would leave other ranks waiting
        return profile
    measured = [(batch.sizes, tuple(size_dependent_numbers(profile)))]
    unpriced = replace(profiled, measurement=MemoryOnlyMeasurement(profiled.measurement))
    is_pair = is_encoder_decoder(model)
    for part in (*profiled_parts(batch, is_pair), *extra_parts(batch, is_pair)):
        try:
            other = _measure(unpriced, part, record_model(unpriced, part, tape_cache))
        except Exception as error:
            log.info(
                "Adacc: the model does not accept a part of the batch (%s): new sizes are profiled as they occur",
                error,
            )
            break
        if profile_structure(other) == profile_structure(profile):
            measured.append((part.sizes, tuple(size_dependent_numbers(other))))
    return replace(profile, measured=tuple(measured)) if len(measured) > 1 else profile


@dataclass(frozen=True, kw_only=True)
class _Readings:
    """Results of the runs in which memory and time are measured for a profile."""

    step: StepLayout
    step_ms: float
    """Milliseconds of a step in which every block is recomputed."""
    chunked_step: StepLayout | None
    """The memory of the step with the chunked head (output layer and loss). None if only one head was measured."""
    head_ms: dict[str, float]
    """Milliseconds of each head. Empty if only one head was measured."""


def _measure(profiled: ProfiledModel, batch: Batch, recording: ModelRecording) -> Profile:
    measurement, installation = profiled.measurement, profiled.installation
    profiled.heads.check_own()
    installation.expect(block.name for block in recording.blocks)
    step = measure_step(profiled, batch, recording)
    original, recording = recording, with_step(recording, step)
    chunked_step = profiled.heads.try_chunked(partial(measure_step, profiled, batch, original))
    installation.begin_step()
    readings = _Readings(
        step=step,
        step_ms=measurement.step_ms(profiled.model, batch.tensors, step.ms),
        chunked_step=chunked_step,
        head_ms={}
        if chunked_step is None
        else profiled.heads.times(partial(profiled.forward_loss, batch), measurement),
    )
    profiled.model.zero_grad(set_to_none=True)  # each measurement left its gradients for the next one
    profile = _assemble(profiled, batch, recording, readings)
    if profiled.config.allows_tiles:
        profile = with_tiled_kinds(profile, profiled, batch, original)
    return with_idle_blocks(profile, installation)


def _assemble(profiled: ProfiledModel, batch: Batch, recording: ModelRecording, readings: _Readings) -> Profile:
    step, shared = readings.step, recording.shared
    resident_bytes = profiled.base_bytes + batch.nbytes
    between_steps_bytes = resident_bytes + profiled.other_batches_bytes + profiled.step.optimizer_state_bytes
    static_bytes = between_steps_bytes + step.earlier_bytes
    replay_records = {index for kind in recording.kinds for index in kind.held}
    replay_bytes = sum(shared[index].nbytes for index in replay_records)
    saved_shared_bytes = sum(record.nbytes for record in shared if record.saved) + replay_bytes
    optimizer_bytes = step.gradient_bytes + profiled.step.optimizer_step_bytes
    host_link, host_free_bytes = profiled.measurement.host_link(
        profiled.device, profiled.config, profiled.installation.model
    )
    names = [block.name for block in recording.blocks]
    head, chunked_step = profiled.heads.profiled_head, readings.chunked_step

    def fields_of_head(layout: StepLayout) -> dict[str, Any]:
        """Return the fields of a profile that depend on the head (output layer and loss). `layout` is the memory of a
        step with this head."""
        return {
            "outside_stored_bytes": layout.outside_stored_bytes - saved_shared_bytes,
            "outside_peak_bytes": static_bytes + layout.outside_peak_bytes,
            "loss_peak_bytes": static_bytes + layout.loss_peak_bytes,
            "tail_peak_bytes": static_bytes + max(layout.tail_peak_bytes, layout.first_peak_bytes),
        }

    other_heads: list[Head] = []
    if chunked_step is not None:
        bases, ms = tuple(static_bytes + chunked_step.bases[name] for name in names), readings.head_ms["chunked"]
        other_heads = [Head(name="chunked", ms=ms, backward_base_bytes=bases, **fields_of_head(chunked_step))]
    return Profile(
        model_class=type(profiled.installation.model).__name__,
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
        available_bytes=profiled.measurement.available_bytes(profiled.device, resident_bytes),
        host_free_bytes=host_free_bytes,
        step_ms=readings.step_ms,
        device=str(profiled.device),
        optimizer_peak_bytes=0 if profiled.step.optimizer is None else between_steps_bytes + optimizer_bytes,
        head=head,
        head_ms=readings.head_ms.get(head, 0.0),
        other_heads=tuple(other_heads),
        measured=((batch.sizes, ()),),
        **fields_of_head(step),
    )
