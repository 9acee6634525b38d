"""The model profiler (paper, section 3.1): tapes, prices and step memory, measured in a few passes over one batch.

One forward records every block's tape, verifies replay and measures prices. Further passes measure memory: one forward,
and one forward and backward under full recomputation for each kind of block, in which one block of the kind is watched.
The first forward and backward is also timed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import NoEstimateError, UncalledBlocksError
from adacc_hf.artifacts.profile import BlockProfile, Head, KindProfile, Profile
from adacc_hf.artifacts.size_model import profile_structure, size_dependent_numbers
from adacc_hf.price.batch_subsampling import (
    UNSUPPORTED_BATCH_ERRORS,
    MemoryOnlyMeasurement,
    is_encoder_decoder,
    move_media_first,
    record_other_sizes,
    resize_profile,
    small_parts,
    with_other_sizes,
)
from adacc_hf.price.heads import ComputeLoss, HeadLayout, HeadProfiler, ModelWithLoss
from adacc_hf.price.idle_blocks import ExecutedBlocks, with_idle_blocks
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import ForwardLayout, NoSync, StepLayout, measure_forward, measure_step_layout
from adacc_hf.price.model_recorder import ModelRecorder, recompute_outcome
from adacc_hf.price.optimizer_memory import coming_state_bytes
from adacc_hf.price.profile_cache import CachingMeasurement, ProfileCache
from adacc_hf.price.unreplayable_kinds import with_untrusted_backward
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.tape_cache import profiled_tapes
from adacc_hf.torch_glue.batch_shapes import batch_shapes, num_elements, to_profile_shapes
from adacc_hf.torch_glue.compat import class_name, without_layerdrop
from adacc_hf.torch_glue.distributed import num_ranks
from adacc_hf.torch_glue.memory import batch_bytes, distinct_bytes, is_out_of_memory
from adacc_hf.torch_glue.no_trace import NoTrace

log = logging.getLogger(__name__)

_profiling_lock = threading.RLock()
"""Held while a thread profiles. A second thread would distort the times and draw from the same random generators."""


def profile_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: AdaccConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    measurement: Measurement | None = None,
    gradient_accumulation_steps: int = 1,
    prefetched_batches: int = 0,
    optimizer_step_bytes: int = 0,
    optimizer_state_bytes: int | None = None,
    compute_loss: ComputeLoss | None = None,
    no_sync: NoSync | None = None,
    all_sizes: bool = False,
) -> Profile:
    """Profile the blocks of `model` on `batch`, the keyword arguments of its forward, labels included.

    The model must be in train mode, and may be under autocast. Its state is restored: gradients, buffers and random
    generators too. If a step calls a block several times, because layers share weights or the loss calls the model
    again, the profile lists the block once per call. A block that runs only without gradients needs no decision.

    Profiling takes the memory of one block's activations on top of full recomputation. If that does not fit, and the
    run has one process, the profile is estimated from small parts of the batch, as by `estimate_profile`, with a
    warning in the log.

    Args:
        optimizer: if given, its state is static memory, and its step a moment of the training step. State that the
            optimizer has yet to make is planned for too.
        optimizer_step_bytes: temporary bytes of clipping and the optimizer's step (`measure_optimizer_step`).
        optimizer_state_bytes: bytes of state that the optimizer has yet to make, 0 or more; None predicts them.
        gradient_accumulation_steps: micro-batches per step. All are on the device, and later micro-batches start with
            the gradients of the first.
        prefetched_batches: further batches for later steps that the loader keeps on the model's device.
        no_sync: context of all micro-batches but the last, if it postpones the exchange of gradients (the `no_sync` of
            FSDP): until then a rank holds whole gradients.
        compute_loss: for a model whose output has no loss, `compute_loss(model, batch)` calls the model and returns the
            loss to train on. `batch` is any mapping that the function needs. It is called some 8 times.
        all_sizes: measure the memory of three parts of the batch too, so that `Profile.sizes` predicts batches of any
            size, if the model accepts parts of a batch. This takes as long as four more steps.
        measurement: the source of the readings, by default real runs. Their prices are cached in the folder that
            `adacc profiles` shows.

    Raises NoBlocksError for a model without repeated blocks, NestedHooksError if other saved-tensor hooks are active,
    CompiledBlockError if torch.compile compiles the blocks, ChunkedHeadError if the config requires a chunked head that
    the model cannot have, UncalledBlocksError for a batch that does not call all blocks, OptimizerStateError for an
    optimizer whose future state cannot be predicted, ProfilerConflictError on a CPU while a torch profiler is active,
    UnrestorableError for a model whose forward changes state that cannot be restored, ValueError for a batch without a
    loss, and torch.OutOfMemoryError, or a library's own out-of-memory error, if even parts of the batch do not fit or
    the model accepts no parts.
    """
    config = config or AdaccConfig()
    measurement = measurement or CachingMeasurement(ProfileCache())
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "prefetched_batches": prefetched_batches,
        "optimizer_step_bytes": optimizer_step_bytes,
        "optimizer_state_bytes": optimizer_state_bytes,
        "compute_loss": compute_loss,
        "no_sync": no_sync,
    }
    try:
        return _profile_of(model, batch, config, optimizer, measurement, all_sizes=all_sizes, **settings)
    except Exception as error:
        if not is_out_of_memory(error) or num_ranks() > 1:
            raise
        out_of_memory = error.with_traceback(None)  # the frames hold the tensors that exceeded the memory
    try:
        profile = estimate_profile(model, batch, config, optimizer, measurement, **settings)
    except (NoEstimateError, UncalledBlocksError, *UNSUPPORTED_BATCH_ERRORS) as reason:
        raise out_of_memory from reason
    log.warning(
        "Adacc: not enough memory to profile the whole batch (%s): estimating its profile from small parts of it. To "
        "measure the profile, use a smaller batch",
        out_of_memory,
    )
    return profile


def _profile_of(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: AdaccConfig,
    optimizer: torch.optim.Optimizer | None,
    measurement: Measurement,
    *,
    gradient_accumulation_steps: int = 1,
    prefetched_batches: int = 0,
    optimizer_step_bytes: int = 0,
    optimizer_state_bytes: int | None = None,
    compute_loss: ComputeLoss | None = None,
    no_sync: NoSync | None = None,
    all_sizes: bool = False,
    is_part: bool = False,
) -> Profile:
    """Return the profile of `batch` itself, as `profile_model` describes. A batch that `is_part` of a list records no
    other sizes, because the list's other parts measure them."""
    _check_trainable(model, batch)
    _check_at_least("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    _check_at_least("prefetched_batches", prefetched_batches, 0)
    _check_at_least("optimizer_step_bytes", optimizer_step_bytes, 0)
    if optimizer_state_bytes is not None:
        _check_at_least("optimizer_state_bytes", optimizer_state_bytes, 0)
    elif optimizer is not None:
        coming_state_bytes(optimizer, model.parameters())  # raises now rather than after minutes of measuring
    device = next(model.parameters()).device
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.device == device]
    measured_step = _MeasuredStep(
        # A step starts without gradients. Gradients that exist now are set aside while the model is profiled.
        static_bytes=measurement.static_bytes(model, batch, optimizer) - distinct_bytes(gradients),
        other_batches_bytes=(gradient_accumulation_steps - 1 + prefetched_batches) * batch_bytes(batch),
        optimizer_bytes=None if optimizer is None else optimizer_step_bytes,
        optimizer=optimizer,
        coming_bytes=optimizer_state_bytes,
        accumulates=gradient_accumulation_steps > 1,
        no_sync=no_sync,
    )
    devices = {parameter.device for parameter in model.parameters()}
    with _profiling_lock, without_layerdrop(model):
        installation = Installation(model, config.block_classes)
        try:
            roots = (model, compute_loss, batch)
            with (
                HeadProfiler(model, config) as head_profiler,
                NoTrace(roots, lambda: measurement.random_states(devices)) as no_trace,
            ):
                installation.on_step = no_trace.start_over
                called_model = model if compute_loss is None else ModelWithLoss(model, compute_loss)

                def new_recorder() -> ModelRecorder:
                    empty_recorder = ModelRecorder(config, measurement)
                    empty_recorder.tape_cache.expect_same_orders(profiled_tapes(model))
                    return empty_recorder

                recorder = _record_blocks(called_model, batch, new_recorder, installation, no_trace)
                profile = _profile(called_model, batch, recorder, installation, measured_step, head_profiler)
                if all_sizes:

                    def new_unpriced_recorder() -> ModelRecorder:
                        return ModelRecorder(config, MemoryOnlyMeasurement(measurement), recorder.tape_cache)

                    def measure(part: Mapping[str, Any]) -> Profile:
                        part_static_bytes = measured_step.static_bytes - batch_bytes(batch) + batch_bytes(part)
                        part_step = replace(measured_step, static_bytes=part_static_bytes)
                        unpriced_recorder = _record_blocks(
                            called_model, part, new_unpriced_recorder, installation, no_trace
                        )
                        return _profile(called_model, part, unpriced_recorder, installation, part_step, head_profiler)

                    profile = with_other_sizes(profile, batch, installation, measure)
                elif measurement.records_other_sizes and not is_part:
                    record_other_sizes(called_model, batch, installation, recorder.tape_cache)
                profiled_tapes(model).take(recorder.tape_cache)
                return profile
        finally:
            installation.remove()


def estimate_profile(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: AdaccConfig,
    optimizer: torch.optim.Optimizer | None = None,
    measurement: Measurement | None = None,
    **settings: Any,
) -> Profile:
    """Estimate the profile of `batch` from the profiles of a few small parts of it.

    Prices come from the smallest part, because recording and pricing together take the most memory. Times are scaled by
    the bytes that are touched, and gradient errors of codecs are taken unchanged. Bytes are extrapolated by
    `profile_sizes`. If a list of parts does not fit into memory, a list of smaller parts replaces it.

    Raises NoEstimateError if the batch is too small to be divided, and the errors of `profile_model`. `settings` are
    further arguments of `profile_model`.
    """
    shapes = batch_shapes(batch)
    choices = small_parts(*move_media_first(model, batch), is_encoder_decoder(model))
    if not choices:
        raise NoEstimateError("the batch has fewer than four samples, and no texts that can be shortened")
    measurement = measurement or CachingMeasurement(ProfileCache())
    profiles: list[Profile] = []
    for parts in choices:
        readings = [measurement, *(MemoryOnlyMeasurement(measurement) for _ in parts[1:])]
        # Scale the threshold: an activation that is large enough for a codec in the batch is smaller in its parts.
        token_share = num_elements(batch_shapes(parts[0])) / num_elements(shapes)
        part_config = replace(config, min_compress_bytes=int(config.min_compress_bytes * token_share))
        try:
            profiles = [
                _profile_of(model, part, part_config, optimizer, reading, is_part=True, **settings)
                for part, reading in zip(parts, readings, strict=True)
            ]
        except UncalledBlocksError:
            raise
        except Exception as error:
            if parts is choices[-1] or not (is_out_of_memory(error) or isinstance(error, UNSUPPORTED_BATCH_ERRORS)):
                raise
            continue
        if all(profile_structure(profile) == profile_structure(profiles[0]) for profile in profiles):
            break
    else:
        raise NoEstimateError("the model runs different operators on different numbers of samples")
    sizes = [to_profile_shapes(batch_shapes(part)) for part in parts]
    measured = tuple(
        (size, tuple(size_dependent_numbers(profile))) for size, profile in zip(sizes, profiles, strict=True)
    )
    estimate = resize_profile(replace(profiles[0], measured=measured), to_profile_shapes(shapes))
    estimated_numbers = tuple(size_dependent_numbers(estimate))
    return replace(estimate, measured=((to_profile_shapes(shapes), estimated_numbers), *measured))


@dataclass(frozen=True, kw_only=True)
class _MeasuredStep:
    """Memory of a training step outside of its micro-batches."""

    static_bytes: int
    """Bytes live now: parameters, buffers, optimizer state, one batch, and other tensors on a GPU."""
    other_batches_bytes: int
    optimizer_bytes: int | None
    """Temporary bytes of clipping and the optimizer's step; None without an optimizer."""
    optimizer: torch.optim.Optimizer | None
    coming_bytes: int | None
    """Bytes of state that the optimizer has yet to make; None to predict them from the parameters that a step
    trains."""
    accumulates: bool
    no_sync: NoSync | None

    def with_trained(self, parameters: Iterable[nn.Parameter]) -> _MeasuredStep:
        """Return this step with the optimizer's coming state predicted for the trained `parameters`."""
        if self.optimizer is None or self.coming_bytes is not None:
            return self
        return replace(self, coming_bytes=coming_state_bytes(self.optimizer, parameters))

    def live_bytes(self, layout: StepLayout) -> int:
        """Return the bytes live before the micro-batch that `layout` measured."""
        return self._between_steps_bytes + layout.earlier_bytes

    def optimizer_peak_bytes(self, layout: StepLayout) -> int:
        """Return the peak once all gradients exist; 0 without an optimizer."""
        if self.optimizer_bytes is None:
            return 0
        return self._between_steps_bytes + layout.gradient_bytes + self.optimizer_bytes

    @property
    def _between_steps_bytes(self) -> int:
        """Bytes live before a step, once the optimizer has a state for all trained parameters."""
        return self.static_bytes + self.other_batches_bytes + (self.coming_bytes or 0)


MAX_DRAWS = 8
"""Forwards without gradients that search for random numbers with which all blocks run, if the model skips blocks at
random."""


def _record_blocks(
    model: nn.Module,
    batch: Mapping[str, Any],
    new_recorder: Callable[[], ModelRecorder],
    installation: Installation,
    no_trace: NoTrace,
) -> ModelRecorder:
    """Record the forward that all passes of the profile will run. If blocks run at random, the forward runs all of
    them.

    Raises UncalledBlocksError if there is no forward that runs all blocks.
    """
    tables: frozenset[Any] = frozenset()
    earlier_structures: set[str] = set()
    while True:
        recorder = new_recorder()
        recorder.record(model, batch, installation)
        called = {block.name for block in recorder.blocks}
        if not called:
            raise UncalledBlocksError(describe_uncalled(installation, list(installation.modules), "with this batch"))
        # The first forward may build tables that every later forward reuses. Training runs like the later ones.
        tables, tables_before = no_trace.start_over(), tables
        has_uncalled = bool(installation.modules.keys() - called)
        has_new_draws = has_uncalled and _find_draws_of_all_blocks(model, batch, installation, no_trace)
        structures = {block.tape.structure for block in recorder.blocks}
        if tables == tables_before and not has_new_draws:
            recorder.tape_cache.preliminary |= earlier_structures - structures
            return recorder
        earlier_structures |= structures


def _find_draws_of_all_blocks(
    model: nn.Module, batch: Mapping[str, Any], installation: Installation, no_trace: NoTrace
) -> bool:
    """Check that all blocks run in a forward without gradients, such as a teacher's blocks that the batch does not
    train.

    If the forward draws random numbers, try other draws, and return True if later passes will start from different
    ones. Raises UncalledBlocksError if some block runs with no draw.
    """
    for num_draws in range(1 + MAX_DRAWS):
        with ExecutedBlocks(installation.modules) as executed, torch.no_grad():
            model(**batch)
        uncalled = [name for name in installation.modules if name not in executed.names]
        if not uncalled:
            return num_draws > 0
        if not no_trace.has_drawn():
            break
        no_trace.continue_random_states()
    raise UncalledBlocksError(describe_uncalled(installation, uncalled, "with this batch"))


def _profile(
    model: nn.Module,
    batch: Mapping[str, Any],
    recorder: ModelRecorder,
    installation: Installation,
    step: _MeasuredStep,
    head_profiler: HeadProfiler,
) -> Profile:
    measurement = recorder.measurement
    head_profiler.check_own()
    blocks = recorder.blocks
    called_names = {block.name for block in blocks}
    idle = [name for name in installation.modules if name not in called_names]
    installation.expect(block.name for block in blocks)
    kinds = recorder.kinds()
    watched_names = {block.kind: block.name for block in blocks}
    by_name = {block.name: kinds[block.kind] for block in blocks}
    shared = tuple(recorder.shared_tensors.records)
    sources = recorder.replay_sources()
    recorder.release_tensors()
    forward = measure_forward(
        model,
        batch,
        installation,
        by_name,
        sources,
        shared,
        {name: name in recorder.calls_before_rest for name in watched_names.values()},
        measurement,
    )
    kinds = recorder.set_forwards([forward.events[watched_names[index]] for index in range(len(kinds))])
    outcomes = {block.name: recompute_outcome(kinds[block.kind]) for block in blocks}

    def measure(watched_group: Collection[str] = ()) -> StepLayout:
        probes = recorder.set_full_recompute_strategies(installation, watched_group, sources)
        return measure_step_layout(
            model, batch, installation, probes, outcomes, measurement, step.accumulates, step.no_sync
        )

    names = tuple(watched_names.values())
    groups = _watched_groups(watched_names, kinds) if measurement.watches_one_block else [names]
    layout = StepLayout.merged({group: measure(group) for group in groups})
    recorder.learn_orders(layout.events)
    recorder.set_full_recompute_strategies(installation, (), sources)
    kinds = [_with_backward(kind, watched_names[index], layout, recorder) for index, kind in enumerate(kinds)]
    # The timed step retained the watched blocks. Full recomputation adds the time of their replay.
    retained_kinds = [
        kinds[index] for index, name in watched_names.items() if name in groups[0] and not kinds[index].untrusted
    ]
    replay_ms = sum(recompute_outcome(kind).overhead_ms for kind in retained_kinds)
    installation.begin_step()
    step_ms = measurement.step_ms(model, batch, layout.ms + replay_ms)
    step = step.with_trained(layout.trained)
    static_bytes = step.live_bytes(layout)
    replay_bytes = sum(shared[index].nbytes for index in {index for kind in kinds for index in kind.held})
    saved_shared_bytes = sum(record.nbytes for record in shared if record.saved) + replay_bytes
    other_head = head_profiler.measure_chunked_head(model, batch, measure, measurement)
    model.zero_grad(set_to_none=True)  # each measurement left its gradients for the next one
    device = next(model.parameters()).device
    profile = Profile(
        model_class=type(installation.model).__name__,
        kinds=tuple(kinds),
        blocks=tuple(
            BlockProfile(
                name=block.name,
                kind=block.kind,
                forward_base_bytes=static_bytes + forward.bases[block.name],
                backward_base_bytes=static_bytes + layout.bases[block.name],
            )
            for block in blocks
        ),
        shared=shared,
        outside_stored_bytes=layout.outside_stored_bytes - saved_shared_bytes,
        static_bytes=static_bytes,
        outside_peak_bytes=static_bytes + layout.outside_peak_bytes,
        outside_live_bytes=min(replay_bytes, max(0, layout.outside_peak_bytes - forward.outside_peak_bytes)),
        loss_peak_bytes=static_bytes + layout.loss_peak_bytes,
        tail_peak_bytes=static_bytes + max(layout.tail_peak_bytes, forward.first_peak_bytes),
        available_bytes=measurement.available_bytes(device, step.static_bytes),
        step_ms=step_ms,
        device=str(device),
        optimizer_peak_bytes=step.optimizer_peak_bytes(layout),
        head=head_profiler.profiled_head,
        head_ms=other_head.ms[head_profiler.profiled_head] if other_head is not None else 0.0,
        other_heads=(
            (_chunked_head(other_head, [block.name for block in blocks], forward, static_bytes, saved_shared_bytes),)
            if other_head
            else ()
        ),
        measured=((to_profile_shapes(batch_shapes(batch)), ()),),
    )
    return with_idle_blocks(profile, idle, installation)


def _watched_groups(watched_names: Mapping[int, str], kinds: Sequence[KindProfile]) -> list[tuple[str, ...]]:
    """Return groups of the watched blocks, one block per kind. A group retains its activations in one measured step.

    No group retains more bytes than the largest block: a model with many kinds would otherwise retain nearly all blocks
    at once.
    """
    nbytes = {
        name: sum(value.nbytes for value in kinds[index].activations if value.saved)
        for index, name in watched_names.items()
    }
    limit, groups = max(nbytes.values()), list[list[str]]()
    for name in sorted(nbytes, key=nbytes.__getitem__, reverse=True):
        group = next((group for group in groups if sum(map(nbytes.__getitem__, group)) + nbytes[name] <= limit), None)
        if group is None:
            groups.append(group := [])
        group.append(name)
    return [tuple(group) for group in groups]


def _chunked_head(
    head_layout: HeadLayout, blocks: list[str], forward: ForwardLayout, static_bytes: int, saved_shared_bytes: int
) -> Head:
    """Return the profile's record of the chunked head."""
    layout = head_layout.layout
    return Head(
        name="chunked",
        ms=head_layout.ms["chunked"],
        outside_stored_bytes=layout.outside_stored_bytes - saved_shared_bytes,
        outside_peak_bytes=static_bytes + layout.outside_peak_bytes,
        loss_peak_bytes=static_bytes + layout.loss_peak_bytes,
        tail_peak_bytes=static_bytes + max(layout.tail_peak_bytes, forward.first_peak_bytes),
        backward_base_bytes=tuple(static_bytes + layout.bases[block] for block in blocks),
    )


def _with_backward(kind: KindProfile, name: str, layout: StepLayout, recorder: ModelRecorder) -> KindProfile:
    if kind.untrusted is not None:
        peak = layout.peaks.get(name)
        extra_bytes = None if peak is None else max(0, peak - recorder.saved_bytes(name))
        return with_untrusted_backward(kind, extra_bytes)
    return replace(kind, backward=layout.events[name])


def _check_trainable(model: nn.Module, batch: Mapping[str, Any]) -> None:
    device = next(model.parameters()).device
    if device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on device='meta', which has no memory: load it to cpu or cuda first "
            f"(from_pretrained, to_empty), or plan without a device with `adacc plan`"
        )
    if not model.training:
        raise ValueError(f"{type(model).__name__} is in eval mode: call model.train() before profiling")
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(
            f"batch={batch!r:.60} must be a non-empty dict of the model's keyword arguments, labels included"
        )


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}={value!r} must be an int of at least {minimum}")


def describe_uncalled(installation: Installation, uncalled: list[str], when: str) -> str:
    """Return an error message that names the blocks that were not called, and the remedies."""
    blocks = {name: class_name(block) for name, block in installation.modules.items()}
    called_classes = sorted({blocks[name] for name in blocks.keys() - set(uncalled)})
    return (
        f"{len(uncalled)} of {len(blocks)} blocks, {uncalled[0]} first, were not called {when}: use a batch that calls "
        f"every block (with an image, for a vision model). If a patch replaced the forward of the blocks' class, or "
        f"the model never uses some blocks, set AdaccConfig(block_classes={tuple(called_classes) or '...'})"
    )
