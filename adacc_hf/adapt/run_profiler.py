"""RunProfiler: profiles batches during the run, under the settings of the training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.optimizer_hooks import InnerSteps, OptimizerProbe
from adacc_hf.adapt.training_loop import TrainingLoop
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import (
    NoEstimateError,
    RankFailedError,
    UncalledBlocksError,
    as_sentence,
)
from adacc_hf.artifacts.profile import Profile
from adacc_hf.price.batch_subsampling import Batch
from adacc_hf.price.estimated_profile import estimate_profile
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.price.optimizer_memory import state_bytes
from adacc_hf.price.profiler import profile_batch
from adacc_hf.price.training_step import NoSync, TrainingStep
from adacc_hf.torch_glue.batch_shapes import (
    BatchShapes,
    batch_shapes,
    bucket_of,
    describe,
    has_same_tensors,
    resize_batch,
)
from adacc_hf.torch_glue.compat import forward_needs_all_ranks
from adacc_hf.torch_glue.distributed import (
    broadcast_from_first_rank,
    common_profile,
    end_process_if_out_of_memory,
    fail_together,
    gather_from_all_ranks,
    is_sharded,
)
from adacc_hf.torch_glue.memory import is_out_of_memory
from adacc_hf.torch_glue.private import is_profiling
from adacc_hf.torch_glue.progress import PROFILING, interruption

log = logging.getLogger(__name__)


class RunProfiler:
    """Profiler of one run's batches.

    `optimizer` and `inner_steps` observe the optimizer's steps during training, whose memory a profile cannot measure.
    """

    def __init__(self, config: AdaccConfig, loop: TrainingLoop) -> None:
        self.optimizer = OptimizerProbe()
        self.inner_steps = InnerSteps()
        self.all_sizes = False
        """True if batches differ in size. A profile then also has a size model, which predicts other sizes."""
        self.counted_state_bytes: int | None = None
        """Bytes of the optimizer's state in the latest profile. None before the first profile."""
        self._config, self._loop = config, loop
        self._has_said_busy = False

    def remove(self) -> None:
        """Remove the hooks from the optimizer. Further calls have no effect."""
        self.optimizer.end()
        self.inner_steps.close()

    def must_wait(self, model: nn.Module) -> bool:
        """Return True if profiling must wait because a torch profiler is active on some rank, and warn once.

        Profiling must wait only on a CPU, where measuring memory uses torch's profiler and would end the active one.
        """
        if next(model.parameters()).device.type != "cpu" or not any(gather_from_all_ranks(is_profiling())):
            return False
        if not self._has_said_busy:
            self._has_said_busy = True
            log.warning(
                "Adacc: a torch profiler is active, and a memory profile on a CPU would end it: the profile waits "
                "until a step ends without a torch profiler, and the model trains as before. Let the profiler end, or "
                "start it some steps after profile_steps=%d",
                self._config.profile_steps,
            )
        return True

    def estimate(
        self, model: nn.Module, optimizer: Any, batch: dict[str, Any], compute_loss: ComputeLoss | None
    ) -> Profile | None:
        """Return this rank's profile of the first batch, estimated from small parts of the batch.

        If the model cannot run on parts, log a message and measure the whole batch. If the whole batch cannot be
        measured outside training either, or the model skips blocks on this batch, log the reason and return None. If
        one rank runs out of memory, torch.OutOfMemoryError is raised on all ranks. If parameters are sharded, the ranks
        profile batches of the first rank's sizes.
        """
        if is_sharded(model):
            common = common_batch(batch)
            if common is None:
                self.note_unpredicted("the ranks' first batches have different tensors, or tensors other than texts")
                return None
            batch = common
        with self._training_mode(model), interruption(PROFILING, "profiling the first batch"):
            try:
                return self._estimate_or_measure(model, optimizer, batch, compute_loss)
            except Exception as error:  # of any type, because a model may raise its own on this batch
                if is_out_of_memory(error) or isinstance(error, RankFailedError):
                    raise
                level = logging.INFO if isinstance(error, UncalledBlocksError) else logging.WARNING
                self.note_unpredicted(as_sentence(error), level)
                log.debug("Adacc: no profile of the first batch", exc_info=error)
                return None

    def _estimate_or_measure(
        self, model: nn.Module, optimizer: Any, batch: dict[str, Any], compute_loss: ComputeLoss | None
    ) -> Profile:
        step = self._training_step(model, optimizer, compute_loss)
        try:
            profile = estimate_profile(model, batch, self._config, step)
        except Exception as error:
            was_broken_off = is_sharded(model) and not isinstance(error, NoEstimateError)
            if is_out_of_memory(error) or was_broken_off or isinstance(error, RankFailedError):
                raise
            self._warn_whole_batch(batch, as_sentence(error))
        else:
            log.info("Adacc: the profile is estimated from small parts of the batch")
            return profile
        return profile_batch(model, batch, self._config, step)

    def measure(
        self, model: nn.Module, optimizer: Any, batch: dict[str, Any] | None, compute_loss: ComputeLoss | None
    ) -> Profile:
        """Return the profile of a whole batch, the same on all ranks.

        Raises RuntimeError if `batch` is None. If one rank runs out of memory, torch.OutOfMemoryError is raised on all
        ranks.
        """
        if batch is None:
            raise RuntimeError(self._loop.no_batch)
        step = self._training_step(model, optimizer, compute_loss)
        phase = f"profiling a batch of {describe(batch_shapes(batch))}"
        # Ranks with shorter batches must run the same passes, because sharded parameters need all ranks.
        config = self._config.for_rows(min(gather_from_all_ranks(Batch(batch).num_tokens)))
        with self._training_mode(model), interruption(PROFILING, phase):
            profile = profile_batch(model, batch, config, step, all_sizes=self.all_sizes)
        return common_profile(profile)  # once all ranks have one

    def measure_resized(
        self,
        sizes: BatchShapes,
        batch: dict[str, Any],
        shapes: BatchShapes,
        model: nn.Module,
        optimizer: Any,
        compute_loss: ComputeLoss | None,
    ) -> tuple[BatchShapes, Profile] | None:
        """Return (sizes, profile) of a batch of `shapes`, resized to `sizes`. See `profile_resized`."""

        def profile(resized_batch: dict[str, Any]) -> Profile:
            self._warn_whole_batch(resized_batch, "no profile predicts batches of this size")
            return self.measure(model, optimizer, resized_batch, compute_loss)

        return profile_resized(sizes, batch, shapes, model, profile)

    def with_advice(self, error: torch.OutOfMemoryError, batch: dict[str, Any]) -> torch.OutOfMemoryError:
        """Return an out-of-memory error with the message of `error`, extended by advice.

        `error` was raised while profiling `batch`.
        """
        return type(error)(
            f"{as_sentence(error)} Adacc was profiling a batch of {describe(batch_shapes(batch))}, which takes the "
            f"activations of one block on top of full recomputation: use a smaller batch or shorter sequences"
            + ("" if self._config.heads == ("chunked",) else ", or head='chunked', which never makes whole logits")
        )

    def note_unpredicted(self, why: str, level: int = logging.INFO) -> None:
        """Log, before the first step, that the first steps run without a policy. `why` is the reason.

        If the budget is given in bytes, this is a warning, because nothing predicts the peak of these steps.
        """
        text = f"the first steps run under torch's checkpoint: {why}"
        if self._has_budget_in_bytes:
            level = logging.WARNING
            text += (
                f". Until there is a profile, memory_budget={self._config.memory_budget!r} limits no step. These steps "
                f"take as much memory as gradient checkpointing: begin with a batch that calls all blocks, or set a "
                f"budget above the peak of training with gradient checkpointing"
            )
        log.log(level, "Adacc: %s", text)

    @property
    def _has_budget_in_bytes(self) -> bool:
        return not isinstance(self._config.memory_budget, float) and self._config.memory_budget != "auto"

    def _warn_whole_batch(self, batch: dict[str, Any], why: str) -> None:
        """Log that a whole batch is about to be profiled instead of small parts. `why` is the reason.

        If the budget is in bytes, the message is a warning.
        """
        budget = self._config.memory_budget
        log.log(
            logging.WARNING if self._has_budget_in_bytes else logging.INFO,
            "Adacc: a whole batch of %s is profiled, which takes the activations of one block on top of full "
            "recomputation, and may exceed memory_budget=%r: %s",
            describe(batch_shapes(batch)),
            budget,
            why,
        )

    @contextmanager
    def _training_mode(self, model: nn.Module) -> Iterator[None]:
        """Set train mode and the loop's autocast inside the `with` block. An error on one rank is raised on all
        ranks."""
        was_training = model.training
        model.train()
        try:
            guarded = end_process_if_out_of_memory() if forward_needs_all_ranks(model) else fail_together()
            with guarded, self._loop.profiling():
                yield
        finally:
            model.train(was_training)

    def _training_step(self, model: nn.Module, optimizer: Any, compute_loss: ComputeLoss | None) -> TrainingStep:
        self.counted_state_bytes = self.state_bytes(model, optimizer)
        return TrainingStep(
            optimizer=optimizer,
            gradient_accumulation_steps=self._loop.num_micro,
            prefetched_batches=self._loop.num_prefetched(next(model.parameters()).device),
            optimizer_step_bytes=self.optimizer.nbytes,
            compute_loss=compute_loss,
            no_sync=self._no_sync(model),
        )

    def state_bytes(self, model: nn.Module, optimizer: Any) -> int:
        """Return the bytes of state that the optimizer holds on the model's device now."""
        return 0 if optimizer is None else state_bytes(optimizer, next(model.parameters()).device)

    def _no_sync(self, model: nn.Module) -> NoSync | None:
        """Return a function that creates a context in which gradients are not synchronized between ranks.

        The training loop uses this context for all micro-batches of a step except the last. Return None if no such
        context is needed, because the model is not sharded.
        """
        return self._loop.no_sync(model) if is_sharded(model) else None


def common_batch(batch: dict[str, Any]) -> dict[str, Any] | None:
    """Return a copy of `batch` that is resized to the sizes of the first rank's batch, so that all ranks can profile
    the same parts.

    Return None if the names of the tensors differ between ranks, or if the batch has data such as images next to token
    ids and masks: the model may reject parts of such a batch, and a forward that fails midway would leave other ranks
    waiting.
    """
    shapes = batch_shapes(batch)
    first = broadcast_from_first_rank(lambda: shapes)
    is_text = has_same_tensors(shapes, first) and all(len(shape.size) == 2 for shape in shapes)
    if not all(gather_from_all_ranks(is_text)):
        return None
    return batch if shapes == first else dict(Batch(batch).resized(first).tensors)


def profile_resized(
    sizes: BatchShapes,
    batch: dict[str, Any],
    shapes: BatchShapes,
    model: nn.Module,
    profile: Callable[[dict[str, Any]], Profile],
) -> tuple[BatchShapes, Profile] | None:
    """Resize `batch` from `shapes` to `sizes`, call `profile` on the result, and return (sizes, profile).

    The model may raise an error on the resized batch, for example because the numbers of image patches and of tokens
    depend on each other. In this case, profile `batch` at its own `shapes` if these are close to `sizes` (in the same
    bucket). Otherwise return None.
    """
    try:
        return sizes, profile(resize_batch(batch, shapes, sizes))
    except (torch.OutOfMemoryError, UncalledBlocksError):
        raise
    except Exception as error:
        if shapes == sizes or forward_needs_all_ranks(model):
            raise
        log.info(
            "Adacc: the model refuses a batch of %s resized to %s (%s): it is profiled at its own size",
            *map(describe, (shapes, sizes)),
            error,
        )
    if not all(gather_from_all_ranks(bucket_of(shapes) == bucket_of(sizes))):
        return None
    return broadcast_from_first_rank(lambda: shapes), profile(batch)
