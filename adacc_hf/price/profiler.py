"""The model profiler (paper, section 3.1): tapes, prices and the memory of a step, from a few passes over one batch.

One forward records every block's tape, verifies replay and takes the prices; one forward, and for each kind of block
one forward and backward under full recomputation, in which one of its blocks is watched closely, measure memory, and
the first of these is timed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import NoEstimateError, UncalledBlocksError
from adacc_hf.artifacts.profile import BlockProfile, Head, KindProfile, Profile
from adacc_hf.artifacts.size_model import numbers_of, profile_outline
from adacc_hf.price.batch_subsampling import (
    NOT_TAKEN,
    MemoryAlone,
    at_size,
    has_pairs,
    media_first,
    record_other_sizes,
    small_parts,
    with_other_sizes,
)
from adacc_hf.price.cost_model import with_untrusted_backward
from adacc_hf.price.heads import ComputeLoss, HeadLayout, HeadSurvey, RanBlocks, WithLoss, with_idle
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import ForwardLayout, NoSync, StepLayout, measure_forward, measure_step_layout
from adacc_hf.price.model_recorder import Survey, recompute_outcome
from adacc_hf.price.optimizer_memory import coming_state_bytes
from adacc_hf.price.profile_cache import ProfileCache, StoringMeasurement
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.tape_cache import library_of_profiles
from adacc_hf.torch_glue.batch_shapes import batch_shapes, num_elements, to_plain
from adacc_hf.torch_glue.compat import class_name, without_layerdrop
from adacc_hf.torch_glue.distributed import num_ranks
from adacc_hf.torch_glue.memory import batch_bytes, distinct_bytes, is_out_of_memory
from adacc_hf.torch_glue.no_trace import NoTrace

log = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()
"""Held while a thread profiles: others would be in its times, and draw from the same generators."""


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

    The model must be in train mode, and may be under autocast. It is left as it was: gradients, buffers and random
    generators too. A block that a step calls several times, since layers share their weights or the loss calls the
    model again, is there once for each call. One that runs without gradients alone has nothing to decide.

    This takes what one block makes on top of full recomputation. Where there is no memory for that, and one process
    alone, the profile is told from those of few samples of the batch, as `estimate_profile` does, and the log says so.

    Args:
        optimizer: if given, its state is static memory, and its step a moment of the training step. What it has yet to
            make is in the plan too.
        optimizer_step_bytes: what clipping and the optimizer's step take for a while (`measure_optimizer_step`).
        optimizer_state_bytes: what the optimizer has yet to make, 0 or more; None finds out.
        gradient_accumulation_steps: micro-batches per step; all of them are on the device, and the later ones find the
            gradients of the first.
        prefetched_batches: further batches that the loader has on the model's device, for the steps to come.
        no_sync: what all of them but the last run in, if it puts off the exchange of gradients (the `no_sync` of FSDP):
            until then a rank holds them whole.
        compute_loss: for a model that makes no loss of its own, `compute_loss(model, batch)` calls it and returns the
            loss to train on. `batch` is whatever that needs. It is called some 8 times.
        all_sizes: measure the memory of three parts of the batch too, which takes as long as four more steps of it, so
            that `Profile.sizes` tells of batches of any size, as far as the model takes parts of a batch.
        measurement: what takes the readings, by default from real runs; prices are then kept in the folder that
            `adacc profiles` shows.

    Raises NoBlocksError for a model without repeated blocks, NestedHooksError if other saved-tensor hooks are active,
    CompiledBlockError if torch.compile compiles the blocks, ChunkedHeadError if the config wants a chunked head that
    the model cannot have, UncalledBlocksError for a batch that leaves blocks out, OptimizerStateError for an optimizer
    whose coming state cannot be known, ProfilerAtWorkError on a CPU while a profiler of torch's is at work,
    UnrestorableError for a model whose forward changes what cannot be put back, ValueError for a batch without a loss,
    and torch.OutOfMemoryError, or what a library says in its place, where there is no memory for few samples either, or
    the model takes no part of a batch.
    """
    config = config or AdaccConfig()
    measurement = measurement or StoringMeasurement(ProfileCache())
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
        out_of_memory = error.with_traceback(None)  # whose frames hold what there is no memory for
    try:
        profile = estimate_profile(model, batch, config, optimizer, measurement, **settings)
    except (NoEstimateError, UncalledBlocksError, *NOT_TAKEN) as reason:
        raise out_of_memory from reason
    log.warning(
        "Adacc: no memory to profile the whole batch (%s): its profile is told from a few of its samples", out_of_memory
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
    """The profile of `batch` itself: see `profile_model`. Of one that `is_part` of a list, the others tell sizes."""
    _check_trainable(model, batch)
    _check_not_below("gradient_accumulation_steps", gradient_accumulation_steps, 1)
    _check_not_below("prefetched_batches", prefetched_batches, 0)
    _check_not_below("optimizer_step_bytes", optimizer_step_bytes, 0)
    if optimizer_state_bytes is not None:
        _check_not_below("optimizer_state_bytes", optimizer_state_bytes, 0)
    elif optimizer is not None:
        coming_state_bytes(optimizer, model.parameters())  # before minutes are spent on what it may refuse
    device = next(model.parameters()).device
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.device == device]
    step = _MeasuredStep(
        # A step begins without gradients: those that are there are set aside for as long as this takes.
        static_bytes=measurement.static_bytes(model, batch, optimizer) - distinct_bytes(gradients),
        other_batches_bytes=(gradient_accumulation_steps - 1 + prefetched_batches) * batch_bytes(batch),
        optimizer_bytes=None if optimizer is None else optimizer_step_bytes,
        optimizer=optimizer,
        coming_bytes=optimizer_state_bytes,
        accumulates=gradient_accumulation_steps > 1,
        no_sync=no_sync,
    )
    devices = {parameter.device for parameter in model.parameters()}
    with _one_at_a_time, without_layerdrop(model):
        installation = Installation(model, config.block_classes)
        try:
            roots = (model, compute_loss, batch)
            with (
                HeadSurvey(model, config) as heads,
                NoTrace(roots, lambda: measurement.random_states(devices)) as run,
            ):
                installation.on_step = run.start_over
                called = model if compute_loss is None else WithLoss(model, compute_loss)

                def empty_survey() -> Survey:
                    empty = Survey(config, measurement)
                    empty.library.expect_same_orders(library_of_profiles(model))
                    return empty

                survey = _recorded(called, batch, empty_survey, installation, run)
                profile = _profile(called, batch, survey, installation, step, heads)
                if all_sizes:

                    def unpriced_survey() -> Survey:
                        return Survey(config, MemoryAlone(measurement), survey.library)

                    def measure(part: Mapping[str, Any]) -> Profile:
                        other = replace(step, static_bytes=step.static_bytes - batch_bytes(batch) + batch_bytes(part))
                        unpriced = _recorded(called, part, unpriced_survey, installation, run)
                        return _profile(called, part, unpriced, installation, other, heads)

                    profile = with_other_sizes(profile, batch, installation, measure)
                elif measurement.records_other_sizes and not is_part:
                    record_other_sizes(called, batch, installation, survey.library)
                library_of_profiles(model).take(survey.library)
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
    """The profile of `batch`, told from those of a few of its samples.

    Prices are those of the smallest part, where recording and pricing together take most memory, times go with the
    bytes that are touched, and what codecs do to gradients is what they do there. Bytes are extrapolated as
    `profile_sizes` does. Where there is no memory for the parts, smaller ones take their place.

    Raises NoEstimateError where nothing can be told from so few samples, and what `profile_model` raises, of which
    `settings` are arguments.
    """
    shapes = batch_shapes(batch)
    choices = small_parts(*media_first(model, batch), has_pairs(model))
    if not choices:
        raise NoEstimateError("it has less than four samples, and no texts that could be cut")
    measurement = measurement or StoringMeasurement(ProfileCache())
    profiles: list[Profile] = []
    for parts in choices:
        readings = [measurement, *(MemoryAlone(measurement) for _ in parts[1:])]
        # An activation that is large enough for a codec in the batch is smaller in its parts.
        share = num_elements(batch_shapes(parts[0])) / num_elements(shapes)
        priced = replace(config, min_compress_bytes=int(config.min_compress_bytes * share))
        try:
            profiles = [
                _profile_of(model, part, priced, optimizer, reading, is_part=True, **settings)
                for part, reading in zip(parts, readings, strict=True)
            ]
        except UncalledBlocksError:
            raise
        except Exception as error:
            if parts is choices[-1] or not (is_out_of_memory(error) or isinstance(error, NOT_TAKEN)):
                raise
            continue
        if all(profile_outline(profile) == profile_outline(profiles[0]) for profile in profiles):
            break
    else:
        raise NoEstimateError("the model runs other operators on other numbers of samples")
    sizes = [to_plain(batch_shapes(part)) for part in parts]
    measured = tuple((size, tuple(numbers_of(profile))) for size, profile in zip(sizes, profiles, strict=True))
    told = at_size(replace(profiles[0], measured=measured), to_plain(shapes))
    return replace(told, measured=((to_plain(shapes), tuple(numbers_of(told))), *measured))


@dataclass(frozen=True, kw_only=True)
class _MeasuredStep:
    """What is live during a training step besides what its micro-batches allocate."""

    static_bytes: int
    """Now: parameters, buffers, optimizer state, one batch, and what else is on a GPU."""
    other_batches_bytes: int
    optimizer_bytes: int | None
    """What clipping and the optimizer take for a while; None without an optimizer."""
    optimizer: torch.optim.Optimizer | None
    coming_bytes: int | None
    """State that the optimizer has yet to make; None where that is what it makes for all that a step trains."""
    accumulates: bool
    no_sync: NoSync | None

    def training(self, parameters: Iterable[nn.Parameter]) -> _MeasuredStep:
        """The same, known to train `parameters`."""
        if self.optimizer is None or self.coming_bytes is not None:
            return self
        return replace(self, coming_bytes=coming_state_bytes(self.optimizer, parameters))

    def live_bytes(self, layout: StepLayout) -> int:
        """What is live before the micro-batch that `layout` measured."""
        return self._between_steps_bytes + layout.earlier_bytes

    def optimizer_peak_bytes(self, layout: StepLayout) -> int:
        """Most bytes live once all gradients are there; 0 without an optimizer."""
        if self.optimizer_bytes is None:
            return 0
        return self._between_steps_bytes + layout.gradient_bytes + self.optimizer_bytes

    @property
    def _between_steps_bytes(self) -> int:
        """What is live before a step, once the optimizer has a state for all that is trained."""
        return self.static_bytes + self.other_batches_bytes + (self.coming_bytes or 0)


MOST_DRAWS = 8
"""Forwards without gradients that look for random numbers with which all blocks run, where chance leaves some out."""


def _recorded(
    model: nn.Module,
    batch: Mapping[str, Any],
    empty_survey: Callable[[], Survey],
    installation: Installation,
    run: NoTrace,
) -> Survey:
    """Record the forward that all passes of the profile will run: with all blocks, where some depend on chance.

    Raises UncalledBlocksError if there is no such forward.
    """
    tables: frozenset[Any] = frozenset()
    earlier: set[str] = set()
    while True:
        survey = empty_survey()
        survey.record(model, batch, installation)
        called = {block.name for block in survey.blocks}
        if not called:
            raise UncalledBlocksError(describe_uncalled(installation, list(installation.modules), "with this batch"))
        # Tables that the first forward makes are there from the second one on, which is what training runs.
        tables, tables_before = run.start_over(), tables
        has_left_out = bool(installation.modules.keys() - called)
        drew_others = has_left_out and _draw_all_blocks(model, batch, installation, run)
        structures = {block.tape.structure for block in survey.blocks}
        if tables == tables_before and not drew_others:
            survey.library.preliminary |= earlier - structures
            return survey
        earlier |= structures


def _draw_all_blocks(model: nn.Module, batch: Mapping[str, Any], installation: Installation, run: NoTrace) -> bool:
    """Check that blocks which the batch does not train run without gradients: a teacher's, say.

    Where random numbers were drawn, try others, and return True if later passes will start from these. Raises
    UncalledBlocksError if some blocks run with none.
    """
    for num_draws in range(1 + MOST_DRAWS):
        with RanBlocks(installation.modules) as ran, torch.no_grad():
            model(**batch)
        left_out = [name for name in installation.modules if name not in ran.names]
        if not left_out:
            return num_draws > 0
        if not run.has_drawn():
            break
        run.draw_on()
    raise UncalledBlocksError(describe_uncalled(installation, left_out, "with this batch"))


def _profile(
    model: nn.Module,
    batch: Mapping[str, Any],
    survey: Survey,
    installation: Installation,
    step: _MeasuredStep,
    heads: HeadSurvey,
) -> Profile:
    measurement = survey.measurement
    heads.check_own()
    blocks = survey.blocks
    called = {block.name for block in blocks}
    idle = [name for name in installation.modules if name not in called]
    installation.expect(block.name for block in blocks)
    kinds = survey.kinds()
    watched = {block.kind: block.name for block in blocks}
    by_name = {block.name: kinds[block.kind] for block in blocks}
    shared = tuple(survey.sharing.records)
    sources = survey.replay_sources()
    survey.let_go()
    forward = measure_forward(
        model,
        batch,
        installation,
        by_name,
        sources,
        shared,
        {name: name in survey.before_rest for name in watched.values()},
        measurement,
    )
    kinds = survey.add_forwards([forward.events[watched[index]] for index in range(len(kinds))])
    recomputed = {block.name: recompute_outcome(kinds[block.kind]) for block in blocks}

    def measure(watched: Collection[str] = ()) -> StepLayout:
        watchers = survey.follow_full_recomputation(installation, watched, sources)
        return measure_step_layout(
            model, batch, installation, watchers, recomputed, measurement, step.accumulates, step.no_sync
        )

    # Where memory is real, one block at a time retains what it makes: where blocks are of many kinds that is nearly all
    # of them together.
    names = tuple(watched.values())
    groups = [(name,) for name in names] if measurement.watches_one_block else [names]
    layout = StepLayout.merged({group: measure(group) for group in groups})
    survey.learn_orders(layout.events)
    survey.follow_full_recomputation(installation, (), sources)
    kinds = [_with_backward(kind, watched[index], layout, survey) for index, kind in enumerate(kinds)]
    # What was watched in the step that was timed was retained: under full recomputation its replay comes on top.
    retained = [kinds[index] for index, name in watched.items() if name in groups[0] and not kinds[index].untrusted]
    replay_ms = sum(recompute_outcome(kind).overhead_ms for kind in retained)
    installation.begin_step()
    step_ms = measurement.step_ms(model, batch, layout.ms + replay_ms)
    step = step.training(layout.trained)
    static_bytes = step.live_bytes(layout)
    replay_bytes = sum(shared[index].nbytes for index in {index for kind in kinds for index in kind.held})
    live_bytes = sum(record.nbytes for record in shared if record.saved) + replay_bytes
    other = heads.other(model, batch, measure, measurement)
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
        outside_stored_bytes=layout.outside_stored_bytes - live_bytes,
        static_bytes=static_bytes,
        outside_peak_bytes=static_bytes + layout.outside_peak_bytes,
        outside_live_bytes=min(replay_bytes, max(0, layout.outside_peak_bytes - forward.outside_peak_bytes)),
        loss_peak_bytes=static_bytes + layout.loss_peak_bytes,
        tail_peak_bytes=static_bytes + max(layout.tail_peak_bytes, forward.first_peak_bytes),
        available_bytes=measurement.available_bytes(device, step.static_bytes),
        step_ms=step_ms,
        device=str(device),
        optimizer_peak_bytes=step.optimizer_peak_bytes(layout),
        head=heads.own,
        head_ms=other.ms[heads.own] if other is not None else 0.0,
        other_heads=(
            (_chunked(other, [block.name for block in blocks], forward, static_bytes, live_bytes),) if other else ()
        ),
        measured=((to_plain(batch_shapes(batch)), ()),),
    )
    return with_idle(profile, idle, installation)


def _chunked(other: HeadLayout, blocks: list[str], forward: ForwardLayout, static_bytes: int, live_bytes: int) -> Head:
    """The record of the chunked head."""
    layout = other.layout
    return Head(
        name="chunked",
        ms=other.ms["chunked"],
        outside_stored_bytes=layout.outside_stored_bytes - live_bytes,
        outside_peak_bytes=static_bytes + layout.outside_peak_bytes,
        loss_peak_bytes=static_bytes + layout.loss_peak_bytes,
        tail_peak_bytes=static_bytes + max(layout.tail_peak_bytes, forward.first_peak_bytes),
        backward_base_bytes=tuple(static_bytes + layout.bases[block] for block in blocks),
    )


def _with_backward(kind: KindProfile, watched: str, layout: StepLayout, survey: Survey) -> KindProfile:
    if kind.untrusted is not None:
        peak = layout.peaks.get(watched)
        besides = None if peak is None else max(0, peak - survey.saved_bytes(watched))
        return with_untrusted_backward(kind, besides)
    return replace(kind, backward=layout.events[watched])


def _check_trainable(model: nn.Module, batch: Mapping[str, Any]) -> None:
    device = next(model.parameters()).device
    if device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on device='meta', where nothing runs: load it to cpu or cuda first "
            f"(from_pretrained, to_empty), or plan without memory with `adacc plan`"
        )
    if not model.training:
        raise ValueError(f"{type(model).__name__} is in eval mode: call model.train() before profiling")
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(
            f"batch={batch!r:.60} must be a non-empty dict of the model's keyword arguments, labels included"
        )


def _check_not_below(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an int of at least {least}")


def describe_uncalled(installation: Installation, uncalled: list[str], when: str) -> str:
    """What to do about blocks that were not called."""
    blocks = {name: class_name(block) for name, block in installation.modules.items()}
    used = sorted({blocks[name] for name in blocks.keys() - set(uncalled)})
    return (
        f"{len(uncalled)} of {len(blocks)} blocks, {uncalled[0]} first, were not called {when}: use a batch that calls "
        f"every block (one with an image, for a model that sees), or, if a patch replaced their class's forward or "
        f"some are never used, name the classes to work on with AdaccConfig(block_classes={tuple(used) or '...'})"
    )
