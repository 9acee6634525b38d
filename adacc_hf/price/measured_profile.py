"""The profile of a batch, measured in a few passes.

One forward records every block's operators, verifies that they can be replayed, and measures times, codec costs, and
the memory of each kind of block (blocks of one kind run the same operators). A forward and backward, in which all
blocks are recomputed, measures the memory of the rest of the step. If the model can have a chunked head, another
forward and backward measures the step with this head.
"""

from __future__ import annotations

import logging
from functools import partial

from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.assembled_profile import Readings, StepBase, assemble
from adacc_hf.price.batch import Batch
from adacc_hf.price.idle_blocks import with_idle_blocks
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import measure_step, with_step
from adacc_hf.price.model_recorder import record_model
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.profiled_model import ProfiledModel, profiled_model
from adacc_hf.price.tiled_kinds import with_tiled_kinds
from adacc_hf.price.training_step import TrainingStep
from adacc_hf.tape.tape_cache import profiled_tapes

log = logging.getLogger(__name__)


def measure_profile(
    model: nn.Module,
    batch: Batch,
    config: AdaccConfig,
    step: TrainingStep,
    measurement: Measurement,
) -> Profile:
    """Profile `batch` with the times and bytes that `measurement` reads. Raises the errors of `profile_model`."""
    with profiled_model(model, batch, config, step, measurement) as profiled:
        recording = record_model(profiled, batch)
        profile = _measure(profiled, batch, recording)
        profiled_tapes(model).take(recording.tape_cache)
        return profile


def _measure(profiled: ProfiledModel, batch: Batch, recording: ModelRecording) -> Profile:
    measurement, installation = profiled.measurement, profiled.installation
    profiled.heads.check_own()
    installation.expect(block.name for block in recording.blocks)
    step = measure_step(profiled, batch, recording)
    original, recording = recording, with_step(recording, step)
    chunked_step = profiled.heads.try_chunked(partial(measure_step, profiled, batch, original))
    installation.begin_step()
    other = {} if chunked_step is None else {"chunked": chunked_step}
    readings = Readings(
        layouts={profiled.heads.profiled_head: step} | other,
        step_ms=measurement.step_ms(profiled.model, batch.tensors, step.ms),
        head_ms=profiled.heads.times(partial(profiled.forward_loss, batch), measurement) if other else {},
    )
    profiled.model.zero_grad(set_to_none=True)  # each measurement left its gradients for the next one
    base = StepBase(
        model=installation.model,
        step=profiled.step,
        config=profiled.config,
        measurement=measurement,
        base_bytes=profiled.base_bytes,
        sizes=batch.sizes,
        batch_bytes=batch.nbytes,
        other_batches_bytes=profiled.other_batches_bytes,
    )
    profile = assemble(base, recording, readings)
    if profiled.config.allows_tiles:
        profile = with_tiled_kinds(profile, profiled, batch, original)
    return with_idle_blocks(profile, installation)
