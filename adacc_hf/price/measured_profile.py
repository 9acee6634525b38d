"""The profile of a batch, measured in a few passes.

One forward records every block's operators, verifies that they can be replayed, and measures times and codec costs.

Further passes measure memory. The first of them is a forward alone. If the model can have a chunked head, this forward
uses the chunked head, and the backward of the head follows (head_memory.py). Each other pass is a forward and backward
for a group of kinds (blocks of one kind run the same operators). One block of each kind in the group, the watched
block, retains its activations, and its memory is recorded. All other blocks are recomputed. The first forward and
backward is also timed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.kind_profile import KindProfile
from adacc_hf.artifacts.profile import BlockProfile, Head, Profile
from adacc_hf.artifacts.size_model import profile_structure, size_dependent_numbers
from adacc_hf.price.batch_subsampling import (
    Batch,
    extra_parts,
    is_encoder_decoder,
    profiled_parts,
)
from adacc_hf.price.head_memory import can_bridge_blocks, measure_forward_and_head
from adacc_hf.price.idle_blocks import with_idle_blocks
from adacc_hf.price.measurement import Measurement, MemoryOnlyMeasurement
from adacc_hf.price.memory_profile import ForwardLayout, StepLayout, measure_forward, measure_step
from adacc_hf.price.model_recorder import record_model, record_other_sizes
from adacc_hf.price.model_recording import ModelRecording, recompute_outcome
from adacc_hf.price.profiled_model import ProfiledModel, profiled_model
from adacc_hf.price.tiled_kinds import with_tiled_kinds
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.price.unreplayable_kinds import with_untrusted_backward
from adacc_hf.tape.tape_cache import TapeCache, profiled_tapes
from adacc_hf.torch_glue.distributed import is_sharded

log = logging.getLogger(__name__)

OtherSizes = Literal["ignored", "recorded", "measured"]
"""Use of smaller parts of the profiled batch: none, recording of operators at other batch sizes, or measurement of
memory too."""


def measure_profile(
    model: nn.Module,
    batch: Batch,
    config: AdaccConfig,
    step: TrainingStep,
    measurement: Measurement,
    other_sizes: OtherSizes = "ignored",
    share: float = 1.0,
) -> Profile:
    """Profile `batch` with the times and bytes that `measurement` reads. Raises the errors of `profile_model`.

    If `batch` is a part of the batch to be trained on, `share` is the fraction of the whole batch's elements that it
    has. The smaller the share, the more blocks may retain their activations in the same measured step.
    """
    with profiled_model(model, batch, config, step, measurement, share) as profiled:
        recording = record_model(profiled, batch)
        profile = _measure(profiled, batch, recording)
        if other_sizes == "measured":
            profile = _with_other_sizes(profile, profiled, batch, recording.tape_cache)
        elif other_sizes == "recorded" and measurement.records_other_sizes:
            record_other_sizes(profiled.model, batch, profiled.installation, recording.tape_cache)
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
            other = _measure(
                replace(unpriced, share=part.share_of(batch)), part, record_model(unpriced, part, tape_cache)
            )
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

    forward: ForwardLayout
    step: StepLayout
    forward_step: StepLayout
    """The memory of the step with the head that the model used when the forward was measured."""
    step_ms: float
    """Milliseconds of a step in which every block is recomputed."""
    coming_bytes: int
    """Bytes of state that the optimizer has yet to create."""
    chunked_step: StepLayout | None
    """The memory of the step with the chunked head (output layer and loss). None if only one head was measured."""
    head_ms: dict[str, float]
    """Milliseconds of each head. Empty if only one head was measured."""


def _measure(profiled: ProfiledModel, batch: Batch, recording: ModelRecording) -> Profile:
    measurement, installation = profiled.measurement, profiled.installation
    profiled.heads.check_own()
    installation.expect(block.name for block in recording.blocks)
    original = recording
    names, groups = tuple(recording.watched_names), _watched_groups(profiled, batch, recording)
    try_chunked, can_bridge = profiled.heads.try_chunked, can_bridge_blocks(profiled, recording)
    with_head = try_chunked(partial(measure_forward_and_head, profiled, batch, recording)) if can_bridge else None
    forward, head_memory = with_head or (None, None)
    recording, forward, step = _measure_blocks(profiled, batch, recording, groups, forward)
    kinds = recording.kinds
    recording.set_full_recompute_strategies(installation.functions, ())
    # The timed step retained the watched blocks. Full recomputation adds the time of their replay.
    retained_kinds = [kind for kind, name in zip(kinds, names, strict=True) if name in groups[0] and not kind.untrusted]
    replay_ms = sum(recompute_outcome(kind).overhead_ms for kind in retained_kinds)
    if head_memory is not None:
        chunked_step: StepLayout | None = head_memory.layout(step)
    else:
        chunked_step = try_chunked(partial(measure_step, profiled, batch, recording))
    installation.begin_step()
    readings = _Readings(
        forward=forward,
        step=step,
        forward_step=step if with_head is None or chunked_step is None else chunked_step,
        step_ms=measurement.step_ms(profiled.model, batch.tensors, step.ms + replay_ms),
        coming_bytes=profiled.step.coming_bytes(step.trained),
        chunked_step=chunked_step,
        head_ms={}
        if chunked_step is None
        else profiled.heads.times(partial(profiled.forward_loss, batch), measurement),
    )
    profiled.model.zero_grad(set_to_none=True)  # each measurement left its gradients for the next one
    profile = _assemble(profiled, batch, recording, readings)
    if profiled.config.allows_tiles:
        profile = with_tiled_kinds(profile, profiled, batch, original, _measure_kinds)
        profiled.model.zero_grad(set_to_none=True)
    return with_idle_blocks(profile, installation)


def _measure_blocks(
    profiled: ProfiledModel,
    batch: Batch,
    recording: ModelRecording,
    groups: Sequence[tuple[str, ...]],
    forward: ForwardLayout | None = None,
) -> tuple[ModelRecording, ForwardLayout, StepLayout]:
    """Measure the memory of all blocks, in a forward and in whole steps.

    Each of `groups` contains the names of blocks that retain their activations in the same measured step. `forward` is
    the memory of the forward if it was measured before, else None. Return a copy of `recording` with the measured
    memory, the memory of the forward, and the memory of the steps.
    """
    forward = forward or measure_forward(profiled, batch, recording)
    recording = recording.with_forwards(forward.events)
    step = StepLayout.merged({group: measure_step(profiled, batch, recording, group) for group in groups})
    recording.learn_orders(step.events)
    pairs = zip(recording.kinds, recording.watched_names, strict=True)
    return (
        replace(recording, kinds=[_with_backward(kind, name, step, recording) for kind, name in pairs]),
        forward,
        step,
    )


def _measure_kinds(profiled: ProfiledModel, batch: Batch, recording: ModelRecording) -> list[KindProfile]:
    profiled.installation.expect(block.name for block in recording.blocks)
    return _measure_blocks(profiled, batch, recording, _watched_groups(profiled, batch, recording))[0].kinds


def _watched_groups(profiled: ProfiledModel, batch: Batch, recording: ModelRecording) -> list[tuple[str, ...]]:
    """Group the watched blocks, which are the last block of each kind. Blocks of one kind run the same operators, and
    the memory of a kind is measured on its watched block.

    The blocks of a group retain their activations in the same measured step. No group retains more bytes than the
    largest block retains on the whole batch, of which `batch` may be a part. Otherwise a model with many kinds would
    retain the activations of nearly all blocks at the same time.
    """
    if not profiled.measurement.watches_one_block:
        return [tuple(recording.watched_names)]
    saved = {
        name: [value for value in kind.activations if value.saved]
        for name, kind in zip(recording.watched_names, recording.kinds, strict=True)
    }
    nbytes = {name: sum(value.nbytes for value in values) for name, values in saved.items()}
    # Other tensors, such as autocast's casts of parameters, have the same bytes on the whole batch.
    growing = {name: sum(v.nbytes for v in vs if batch.dimensions & set(v.shape)) for name, vs in saved.items()}
    limit = max(nbytes[name] + growing[name] * (1 / profiled.share - 1) for name in saved)
    # The first step also measures the memory of the head. If the last block retains its activations, the tensors that
    # only its replay would hold, such as a loop's position bias, count for the head. So this block has a later step.
    last = recording.blocks[-1].name
    groups: list[list[str]] = []
    for name in sorted(nbytes, key=lambda name: (name == last, -nbytes[name])):
        others = groups[1:] if name == last else groups
        group = next((g for g in others if sum(map(nbytes.__getitem__, g)) + nbytes[name] <= limit), None)
        if group is None:
            groups.append(group := [])
        group.append(name)
    return [tuple(group) for group in groups]


def _with_backward(kind: KindProfile, name: str, step: StepLayout, recording: ModelRecording) -> KindProfile:
    """Return a copy of `kind` with the memory of its backward, which was measured at the block call `name`."""
    if kind.untrusted is not None:
        peak = step.peaks.get(name)
        extra_bytes = None if peak is None else max(0, peak - recording.saved_bytes[name])
        return with_untrusted_backward(kind, extra_bytes)
    return replace(kind, backward=step.events[name])


def _assemble(profiled: ProfiledModel, batch: Batch, recording: ModelRecording, readings: _Readings) -> Profile:
    forward, step, shared = readings.forward, readings.step, recording.shared
    resident_bytes = profiled.base_bytes + batch.nbytes
    between_steps_bytes = resident_bytes + profiled.other_batches_bytes + readings.coming_bytes
    static_bytes = between_steps_bytes + step.earlier_bytes
    replay_bytes = sum(shared[index].nbytes for index in {index for kind in recording.kinds for index in kind.held})
    saved_shared_bytes = sum(record.nbytes for record in shared if record.saved) + replay_bytes
    optimizer_bytes = step.gradient_bytes + profiled.step.optimizer_step_bytes
    host_link, host_free_bytes = profiled.measurement.host_link(
        profiled.device, profiled.config, profiled.installation.model
    )
    forward_step = readings.forward_step
    names = [block.name for block in recording.blocks]
    head, chunked_step = profiled.heads.profiled_head, readings.chunked_step

    def fields_of_head(layout: StepLayout) -> dict[str, Any]:
        """Return the fields of a profile that depend on the head (output layer and loss). `layout` is the memory of a
        step with this head."""
        return {
            "outside_stored_bytes": layout.outside_stored_bytes - saved_shared_bytes,
            "outside_peak_bytes": static_bytes + layout.outside_peak_bytes,
            "loss_peak_bytes": static_bytes + layout.loss_peak_bytes,
            "tail_peak_bytes": static_bytes + max(layout.tail_peak_bytes, forward.first_peak_bytes),
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
                forward_base_bytes=static_bytes + forward.bases[block.name],
                backward_base_bytes=static_bytes + step.bases[block.name],
            )
            for block in recording.blocks
        ),
        shared=shared,
        static_bytes=static_bytes,
        outside_live_bytes=min(replay_bytes, max(0, forward_step.outside_peak_bytes - forward.outside_peak_bytes)),
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
