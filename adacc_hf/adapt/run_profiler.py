"""RunProfiler: profiles micro-batches of a run, and an optimizer step, while they train. TrainingLoop:
properties of a training loop. The subclass for the Trainer is in `callbacks/trainer_loop.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ProfilerConflictError
from adacc_hf.artifacts.profile import Profile
from adacc_hf.head.head import ChunkedHead
from adacc_hf.price.batch import Batch, TrainingStep
from adacc_hf.price.live_step import LiveStep
from adacc_hf.price.measurement import Measurement, OptimizerMeter, state_bytes
from adacc_hf.price.tiled_kinds import TiledKinds
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.tape_cache import TapeCache, profiled_tapes
from adacc_hf.torch_glue.batch_shapes import num_elements
from adacc_hf.torch_glue.distributed import (
    common_profile,
    fail_together,
    gather_from_all_ranks,
    is_sharded,
)
from adacc_hf.torch_glue.private import is_profiling

log = logging.getLogger(__name__)


class TrainingLoop:
    """Properties of a user's own training loop."""

    num_unrecorded_steps = 0
    """Number of first steps that differ from later ones, so that no micro-batch of them is profiled."""
    how_to_train = "call model.train(), and the session's own model within session.step(batch)"
    """Advice for a step that has not called the session's model for training."""

    def __init__(self, num_micro: int = 1, folder: str | None = None) -> None:
        self.num_micro = num_micro
        """Micro-batches per step. In a user's own loop, the number of micro-batches in the previous step, or a guess in
        the first step."""
        self.folder = folder
        """Folder for the run's policy, profile and history. None writes no files."""

    def num_prefetched(self, device: torch.device) -> int:
        """Return the number of batches that the loop has already moved to `device` for later steps."""
        return 0

    def num_before_step(self, device: torch.device) -> int:
        """Return the number of batches on `device` when a step begins, which its measured memory does not include."""
        return int(device.type == "cpu")

    @property
    def postpones_exchange(self) -> bool:
        """True if ranks exchange gradients only in the last micro-batch of a step."""
        return False


class RunProfiler:
    """Profiler of one run's micro-batches, and of the temporary memory of an optimizer step."""

    def __init__(self, config: AdaccConfig, loop: TrainingLoop, optimizer: Any = None) -> None:
        self.has_inner_steps = False
        """True once an optimizer has stepped within a micro-batch, as DeepSpeed's do. The session's own `optimizer` is
        ignored: a user's loop may step it there."""
        self._optimizer = optimizer
        self._step_hook: Any = None
        self.live: LiveStep | None = None
        """The recorded micro-batch of the current step, or None."""
        self.counted_state_bytes: int | None = None
        """Bytes of the optimizer's state in the latest profile. None before the first profile."""
        self.bucket_bytes = 0
        """`LiveStep.bucket_bytes` in the latest profile."""
        self._config, self._loop = config, loop
        self._measurement = Measurement()
        self._tape_cache: TapeCache | None = None
        self._taken: LiveStep | None = None
        """The micro-batch of the latest profile of this rank."""
        self._tiles: TiledKinds | None = None
        """Kinds of blocks whose modules run in tiles (groups of rows) in the next recorded micro-batch, or None."""
        self._has_said_busy = False
        self._has_seen_optimizer = False
        """True once an optimizer step was measured, or could not be because another profiler was active."""
        self._optimizer_meter: OptimizerMeter | None = None
        """The running meter while an optimizer step is measured, else None."""
        self._optimizer_bytes = 0

    def remove(self) -> None:
        """Remove all hooks. Further calls have no effect."""
        self.cancel()
        self.end_optimizer()
        self.ignore_steps()

    def watch_steps(self) -> None:
        """Detect optimizer steps until `ignore_steps`."""
        self.ignore_steps()
        self._step_hook = register_optimizer_step_pre_hook(self._note_step)

    def ignore_steps(self) -> None:
        if self._step_hook is not None:
            self._step_hook.remove()
        self._step_hook = None

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self.has_inner_steps |= optimizer is not self._optimizer

    @property
    def is_recording(self) -> bool:
        """True while a micro-batch is recorded."""
        return self.live is not None and self.live.is_open

    def is_turn(self, number: int, model: nn.Module) -> bool:
        """Return True if micro-batch `number` of a step, counted from 1, is the one to record: one that finds gradients
        of earlier ones, or the last, if ranks exchange gradients only there."""
        is_last_only = is_sharded(model) and self._loop.postpones_exchange
        return number == (self._loop.num_micro if is_last_only else min(2, self._loop.num_micro))

    def must_wait(self, model: nn.Module) -> bool:
        """Return True if profiling must wait because a torch profiler is active on this rank, and warn once.

        Profiling must wait only on a CPU, where measuring memory uses torch's profiler and would end the active one.
        """
        if next(model.parameters()).device.type != "cpu" or not is_profiling():
            return False
        if not self._has_said_busy:
            self._has_said_busy = True
            log.warning(
                "Adacc: a torch profiler is active, and a memory profile on a CPU would end it: the profile waits "
                "until a step without a torch profiler, and the model trains as before. Let the profiler end, or "
                "start it some steps after profile_steps=%d",
                self._config.profile_steps,
            )
        return True

    def begin(
        self,
        installation: Installation,
        optimizer: Any,
        inputs: Any,
        tape_cache: TapeCache | None = None,
        head: ChunkedHead | None = None,
    ) -> None:
        """Begin to record a micro-batch on `inputs`, before the model's forward. `tape_cache` and `head` are those of a
        policy handle, if the model has one."""
        model = installation.model
        if tape_cache is None:
            tape_cache = self._tape_cache or TapeCache(self._measurement.verify)
            tape_cache.expect_same_orders(profiled_tapes(model))
        self._tape_cache = tape_cache
        self.counted_state_bytes = self.state_bytes(model, optimizer)
        step = TrainingStep(
            optimizer=optimizer,
            gradient_accumulation_steps=self._loop.num_micro,
            prefetched_batches=self._loop.num_prefetched(next(model.parameters()).device),
        )
        tilings = None if self._tiles is None else self._tiles.tilings
        self.live = LiveStep(installation, self._config, self._measurement, tape_cache, head, tilings)
        try:
            self.live.begin(_batch_of(inputs), step)
        except BaseException:
            self.cancel()
            raise

    def enter_forward(self, inputs: Any) -> None:
        """Enter a call of the model on `inputs` in the recorded micro-batch."""
        if self.live is not None and self.live.is_open:
            self.live.note_batch(_batch_of(inputs))
            self.live.enter_forward()

    def end_forward(self, loss: Any) -> None:
        """End a call of the model, or the computation of the loss, in the recorded micro-batch."""
        if self.live is not None and self.live.is_open:
            self.live.leave_forward(loss)

    def end_backward(self) -> None:
        """End the recorded micro-batch. Do nothing if no micro-batch is being recorded."""
        if self.live is not None and self.live.is_open:
            try:
                self.live.end()
            except ProfilerConflictError as error:
                log.warning("Adacc: %s", error)
                self.live = None

    def cancel(self) -> None:
        """Stop recording, and drop the recording. Do nothing if no micro-batch was recorded."""
        live, self.live = self.live, None
        if live is not None:
            live.cancel()

    def take(self, model: nn.Module, optimizer: Any, is_largest: bool = False) -> Profile | None:
        """Return the profile of the recorded micro-batch at the end of its step, the same on all ranks: that of the
        first rank, or of the largest micro-batch if `is_largest`.

        Return None if some rank has recorded no micro-batch.
        """
        live, self.live = self.live, None
        if not all(gather_from_all_ranks(live is not None)) or live is None:
            return None
        before, self.counted_state_bytes = self.counted_state_bytes or 0, self.state_bytes(model, optimizer)
        with fail_together():
            profile = live.profile(
                optimizer_step_bytes=self._optimizer_bytes,
                optimizer_state_bytes=max(0, self.counted_state_bytes - before),
            )
        assert self._tape_cache is not None
        self._taken, self.bucket_bytes = live, live.bucket_bytes
        profiled_tapes(model).take(self._tape_cache)
        return common_profile(profile, num_elements(profile.measured[0][0]) if is_largest else 0)

    def begin_tiles(self, profile: Profile, installation: Installation) -> bool:
        """Record the next micro-batch with row-wise modules in tiles, if modules of the blocks of `profile`, the latest
        one, may run in tiles on all ranks. Return False if not, or if the budget does not limit the peak."""
        if isinstance(self._config.memory_budget, float):
            return False
        assert self._taken is not None
        tiles = TiledKinds(profile, self._taken.recording, installation, self._taken.config)
        self._tiles = tiles if all(gather_from_all_ranks(bool(tiles.tilings))) else None
        return self._tiles is not None

    def take_tiles(self, model: nn.Module) -> Profile | None:
        """Return the profile to which `begin_tiles` belongs with the kinds of blocks in tiles that were recorded in
        this step. Return None if some rank has recorded no micro-batch of its sizes."""
        live, self.live = self.live, None
        assert self._tiles is not None
        assert self._tape_cache is not None
        has_sizes = live is not None and live.sizes == self._tiles.profile.measured[0][0]
        if not all(gather_from_all_ranks(has_sizes)) or live is None:
            return None
        tiles, self._tiles = self._tiles, None
        profiled_tapes(model).take(self._tape_cache)
        return common_profile(tiles.added(live.recording))

    def begin_optimizer(self, model: nn.Module) -> None:
        """Begin to measure the optimizer's step. Do nothing if a step was measured."""
        if self._has_seen_optimizer:
            return
        self._has_seen_optimizer = True
        device = next(model.parameters()).device
        if device.type == "cpu" and is_profiling():
            log.info("Adacc: another profiler is active: the plan leaves out the optimizer's temporary memory")
        else:
            self._optimizer_meter = OptimizerMeter(device).__enter__()

    def end_optimizer(self) -> None:
        """End the measurement after the optimizer's step. Do nothing if no measurement is running."""
        meter, self._optimizer_meter = self._optimizer_meter, None
        if meter is not None:
            with suppress(ProfilerConflictError):
                meter.__exit__(None, None, None)
            self._optimizer_bytes = meter.nbytes

    def state_bytes(self, model: nn.Module, optimizer: Any) -> int:
        """Return the bytes of state that the optimizer holds on the model's device now."""
        return 0 if optimizer is None else state_bytes(optimizer, next(model.parameters()).device)


def _batch_of(inputs: Any) -> Batch:
    return Batch(dict(inputs) if isinstance(inputs, Mapping) else {})
