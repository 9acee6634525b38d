"""Profile of a micro-batch, recorded and measured while the micro-batch trains.

A recorded call follows the plan that recomputes all it can. Times of operators and codecs, and the memory of a block's
graph, are measured right after the call, and the memory of the rest of the step in the step.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from threading import get_ident
from typing import Any

import torch
from torch import nn

from adacc_hf.artifacts.call_names import call_name
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import ChunkedHeadError, ConcurrentCallError
from adacc_hf.artifacts.profile import BlockProfile, Profile
from adacc_hf.artifacts.tiles import Tiling
from adacc_hf.head.head import ChunkedHead
from adacc_hf.price.batch import Batch, TrainingStep
from adacc_hf.price.head_memory import HeadMeter
from adacc_hf.price.idle_blocks import with_idle_blocks
from adacc_hf.price.measurement import Measurement
from adacc_hf.price.memory_profile import CallMarks, gradient_bytes, kinds_in_step, step_layout, unwinds
from adacc_hf.price.model_recorder import ModelRecorder, state_storages
from adacc_hf.price.model_recording import ModelRecording
from adacc_hf.price.shared_storage import storage_key_of
from adacc_hf.run.blocks import Installation
from adacc_hf.tape.inputs import argument_tensors
from adacc_hf.tape.tape_cache import TapeCache
from adacc_hf.torch_glue.distributed import bucket_bytes, is_sharded
from adacc_hf.torch_glue.meters import MemoryMeter
from adacc_hf.torch_glue.private import current_autograd_node, outer_hooks, version_of
from adacc_hf.torch_glue.tensors import kept_by_autograd

log = logging.getLogger(__name__)

OTHER_BACKWARD = (
    "Adacc: the backward of the blocks does not run once and in the reverse order of their forward, as with several "
    "losses in a step: the next step may take more memory than its policy predicts. Call backward on the sum of the "
    "losses, or on each loss before the next forward"
)
ONE_THREAD = "call the model in the thread that enters session.step(batch), or that calls trainer.train()"


class LiveStep:
    """Micro-batch of training from which a profile is made.

    Call `begin` before the model's forward, `end` after backward, and `profile` after the optimizer's step, or
    `cancel`. The strategies of the blocks of `installation` are replaced meanwhile.
    """

    def __init__(
        self,
        installation: Installation,
        config: AdaccConfig,
        measurement: Measurement,
        tape_cache: TapeCache,
        head: ChunkedHead | None = None,
        tilings: Mapping[str, Tiling] | None = None,
        repeats_blocks: bool = False,
    ) -> None:
        self._installation, self._measurement, self._tape_cache = installation, measurement, tape_cache
        self.config, self._head, self._tilings = config, head, tilings or {}
        self._repeats_blocks = repeats_blocks
        self.bucket_bytes = 0
        """Bytes of DDP's gradient buckets on a CPU, where no allocator counts them."""
        self._own_head: ChunkedHead | None = None
        self._stack = ExitStack()
        self.hooks = _OutsideHooks(self)
        self._has_forward_ended = False
        self._loss_bytes = 0
        self.is_open = False
        """True from `begin` to `end` or `cancel`."""

    def begin(self, batch: Batch, step: TrainingStep, aside_bytes: int = 0) -> None:
        """Begin before the forward of a micro-batch on `batch`, which may be empty until `note_batch`. `aside_bytes`
        are on the device, and no part of the step's memory."""
        model = self._installation.model
        gc.collect()  # garbage that is freed in the step would lower its bytes
        self._step, self.thread = step, get_ident()
        self.device = next(model.parameters()).device
        self._earlier_bytes = gradient_bytes(model)
        self._static_bytes = self._measurement.static_bytes(model, batch.tensors, step.optimizer) - aside_bytes
        self._state_keys = state_storages(model)
        self._note(batch)
        self.recorder = ModelRecorder(
            self.config, self._measurement, self._tape_cache, self._tilings, self.device, self._repeats_blocks
        )
        self.recorder.leaves_gradients = self._earlier_bytes > 0
        self._meter = self._measurement.meter(self.device)
        self._prepare_head(model)
        installation, self.is_open = self._installation, True
        self._strategies = {name: call.strategy for name, call in installation.calls.items()}
        installation.expect(installation.blocks)
        self._marks = CallMarks(self._meter, self._measurement, self.end_forward)
        for index, (name, call) in enumerate(installation.calls.items()):
            call.strategy = _LiveStrategy(name, self, is_first=index == 0)
        self._stack.enter_context(self._meter)
        self._begin_seconds = self._measurement.seconds_at(self.device)
        self._aside_seconds = 0.0
        if self.sizes:
            self.enter_forward()

    def note_batch(self, batch: Batch) -> None:
        """Set the batch of a micro-batch that began before its batch was known. Do nothing if it was known."""
        if not self.sizes:
            self._note(batch)
            if self.device.type == "cpu":  # where the bytes in use are the sum of the known tensors
                self._static_bytes += batch.nbytes

    def _note(self, batch: Batch) -> None:
        self.sizes, self._batch_bytes = batch.sizes, batch.nbytes
        if self.sizes:
            self.config = self.config.for_rows(batch.num_tokens)
        self._batch_keys = {storage_key_of(tensor) for _, tensor in argument_tensors((), dict(batch.tensors))}

    def enter_forward(self) -> None:
        """Enter the saved-tensor hooks around a call of the model, in which autograd saves tensors. Outside of such a
        call, they would stop `torch.func.grad`."""
        if self.is_elsewhere:  # the first block refuses to run
            return
        if outer_hooks() is None:  # else each block refuses the hooks around it, unless they are these
            self.hooks.begin()

    @property
    def is_elsewhere(self) -> bool:
        """True in another thread than the step began in, whose meter a meter of this thread would wait for on a CPU."""
        return self.device.type == "cpu" and get_ident() != self.thread

    def _prepare_head(self, model: nn.Module) -> None:
        """Observe the losses, if the config allows a chunked head. Chunk them if whole logits may exceed the budget."""
        self._head_meter: HeadMeter | None = None
        if "chunked" not in self.config.heads or (is_sharded(model) and len(self.config.heads) > 1):
            return
        if self._head is None:
            try:
                self._head = self._own_head = ChunkedHead(model)
            except ChunkedHeadError as error:
                if self.config.heads == ("chunked",):
                    raise
                log.info("Adacc: the head uses full logits (head='plain'): %s", error)
                return
        self._head_meter = HeadMeter(
            self._head, self._measurement, self.aside, self._is_of_batch, is_plain=not self._is_head_chunked
        )
        if self._tilings:  # the heads have been measured in an earlier step
            self._head.on_loss = None

    def _is_of_batch(self, tensor: torch.Tensor) -> bool:
        return storage_key_of(tensor) in self._batch_keys

    @contextmanager
    def aside(self) -> Iterator[MemoryMeter]:
        """Take memory and time that are no part of the step's. Yield a meter of this memory."""
        started = self._measurement.seconds_at(self.device)
        try:
            with self._measurement.meter(self.device) as meter:
                yield meter
        finally:
            self._aside_seconds += self._measurement.seconds_at(self.device) - started

    def run(
        self,
        name: str,
        block: nn.Module,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_first: bool,
    ) -> Any:
        """Run and record the call `name` of a block, the first of a forward if `is_first`."""
        if self.device.type == "cpu" and not self.called:  # on a GPU, the allocator counts the buckets
            self.bucket_bytes = bucket_bytes()
            self._static_bytes += self.bucket_bytes

        if is_first:  # the loop may call blocks outside of the model's forward
            self.enter_forward()

        def record() -> Any:
            with self.aside():
                return self.recorder.record_call(name, block, fn, args, kwargs)

        return self._marks.run(name, record, args, is_first)

    def end_forward(self) -> None:
        """End the forward, when backward begins. Further calls have no effect."""
        if self._has_forward_ended or not self.is_open:
            return
        self._has_forward_ended = True
        self._meter.mark(("loss",))
        self.recorder.end_forward(self._state_keys, self._batch_keys)

    def leave_forward(self, loss: Any = None) -> None:
        """Leave the saved-tensor hooks around the model's forward, which has computed `loss` if this is a tensor."""
        self.hooks.end()
        if self.is_open and isinstance(loss, torch.Tensor) and loss.requires_grad:
            self._loss_bytes = loss.untyped_storage().nbytes()
            self._measurement.on_gradient(loss, self.end_forward)

    def end(self) -> None:
        """End after the micro-batch's backward."""
        self.leave_forward()
        self.end_forward()
        self._meter.mark(("end",))  # sets the marks of a backward in another thread
        seconds = self._measurement.seconds_at(self.device) - self._begin_seconds - self._aside_seconds
        self._step_ms = 1e3 * seconds
        self._gradient_bytes = gradient_bytes(self._installation.model)
        self._close()

    def cancel(self) -> None:
        """Stop without a result. Further calls have no effect."""
        self.hooks.end()
        self._close()

    def _close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if self._head_meter is not None:
            self._head_meter.close()
        if self._own_head is not None:
            self._own_head.remove()
            self._head = self._own_head = None
        installation = self._installation
        if installation.modules:
            if list(installation.calls) != list(self._strategies):
                installation.expect(self._strategies)
            for name, strategy in self._strategies.items():
                installation.calls[name].strategy = strategy
        self._stack.close()

    @property
    def called(self) -> set[str]:
        """Names of the calls that were recorded."""
        return {block.name for block in self.recorder.blocks}

    @cached_property
    def recording(self) -> ModelRecording:
        """The recorded calls of blocks."""
        return self.recorder.recording()

    def profile(self, **changes: Any) -> Profile:
        """Return the profile, after `end`. `changes` are fields of the `TrainingStep` that were not known before."""
        step = replace(self._step, **changes)
        recording = self.recording
        in_blocks_ms = sum(recording.kinds[block.kind].forward_ms for block in recording.blocks)
        kept_bytes = {block.name: recording.kept_bytes(block) for block in recording.blocks}
        layout = step_layout(self._meter.points, kept_bytes, self.recorder.leftovers)
        if not isinstance(self.config.memory_budget, float) and not unwinds(self._meter.points):
            log.warning(OTHER_BACKWARD)
        kinds, shared = kinds_in_step(recording, layout), recording.shared_tensors.records
        model, measurement = self._installation.model, self._measurement
        host_link, host_free_bytes = measurement.host_link(self.device, self.config, model)
        later_bytes = step.other_batches_bytes(self._batch_bytes) + step.optimizer_state_bytes
        static_bytes = self._static_bytes + later_bytes
        replay_records = {index for kind in kinds for index in kind.held}
        saved_records = replay_records | {index for index, record in enumerate(shared) if record.saved}
        saved_shared_bytes = sum(shared[index].nbytes for index in saved_records)
        optimizer_bytes = self._gradient_bytes - self._earlier_bytes + step.optimizer_step_bytes
        profile = Profile(
            model_class=type(model).__name__,
            kinds=tuple(replace(kind, host_link=host_link) for kind in kinds),
            blocks=tuple(
                BlockProfile(
                    name=block.name,
                    kind=block.kind,
                    forward_base_bytes=static_bytes + layout.forward_bases[block.name],
                    backward_base_bytes=static_bytes + layout.bases[block.name],
                )
                for block in recording.blocks
            ),
            shared=tuple(shared),
            outside_stored_bytes=layout.outside_stored_bytes - self._loss_bytes - saved_shared_bytes,
            static_bytes=static_bytes,
            outside_peak_bytes=static_bytes + layout.outside_peak_bytes,
            loss_peak_bytes=static_bytes + layout.loss_peak_bytes,
            tail_peak_bytes=static_bytes + layout.tail_peak_bytes,
            outside_live_bytes=sum(shared[index].nbytes for index in replay_records & recording.shared_tensors.freed),
            available_bytes=measurement.available_bytes(model, step.optimizer),
            host_free_bytes=host_free_bytes,
            step_ms=self._step_ms + in_blocks_ms,
            device=str(self.device),
            optimizer_peak_bytes=0 if step.optimizer is None else static_bytes + optimizer_bytes,
            measured=((self.sizes, ()),),
        )
        return self._with_heads(with_idle_blocks(profile, self._installation))

    def _with_heads(self, profile: Profile) -> Profile:
        """Return `profile` with each head that a policy may choose."""
        meter = self._head_meter
        if meter is None or (not meter.has_both and len(self.config.heads) > 1):
            return profile
        meter.check()
        return replace(profile, head="chunked") if self.config.heads == ("chunked",) else meter.with_both(profile)

    @property
    def _is_head_chunked(self) -> bool:
        budget = self.config.memory_budget
        return self.config.heads == ("chunked",) or not (isinstance(budget, float) or budget == "auto")


class _LiveStrategy:
    """Strategy that records the calls of one block while the model trains."""

    def __init__(self, name: str, live: LiveStep, is_first: bool) -> None:
        self.name, self.live, self.is_first = name, live, is_first
        self.num_calls = 0

    @property
    def expects_outer_hooks(self) -> bool:
        """True if the hooks around the block are those of the recording. Others are refused."""
        hooks = outer_hooks()
        return hooks is not None and getattr(hooks[0], "__self__", None) is self.live.hooks

    def run(self, block: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current_autograd_node() is not None:  # code within backward, where no profiler can begin
            return fn(*args, **kwargs)
        if self.live.is_elsewhere:
            raise ConcurrentCallError(f"block {self.name} runs in another thread than the step began in: {ONE_THREAD}")
        self.num_calls += 1
        name, is_first = call_name(self.name, self.num_calls), self.is_first and self.num_calls == 1
        return self.live.run(name, block, fn, args, kwargs, is_first)


class _OutsideHooks:
    """Saved-tensor hooks around a forward, which note the tensors saved outside the blocks, and the first unpack."""

    def __init__(self, live: LiveStep) -> None:
        self._live = weakref.ref(live)  # the graph of the step keeps these hooks alive
        self._hooks: Any = None

    def begin(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    @torch.compiler.disable
    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        live = self._live()
        if live is not None:
            live.recorder.note_outside_storage(tensor)
        return kept_by_autograd(tensor), version_of(tensor)

    @torch.compiler.disable
    def _unpack(self, packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        live = self._live()
        if live is not None:
            live.end_forward()
        tensor, version = packed
        if version_of(tensor) != version:
            raise RuntimeError(
                "a tensor needed for backward was changed in place after the forward: change it after backward, or "
                "change a copy"
            )
        return tensor
