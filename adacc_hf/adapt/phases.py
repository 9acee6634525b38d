"""WarmUpPhase: training before the first policy of a run. `follow` and `resume` begin the phases with a policy.

NOTE [Phases of a run]
| phase | blocks run under | begins | ends |
|---|---|---|---|
| Phase | nothing | before and after a run | `AdaccSession.begin` |
| WarmUpPhase | torch's checkpoint | a run without a policy | the first policy: before a forward, or after a step |
| FixedPolicyPhase | the user's policy, unchanged | such a policy, or its checkpoint | the run's end |
| AdaptivePhase | policies that follow the data | the first solved policy, or its checkpoint | the run's end |
| CompiledPhase | compiled graphs (callbacks/compiled_phase.py) | a model compiled as a whole | the run's end |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from adacc_hf.adapt.adaptive_phase import AdaptivePhase
from adacc_hf.adapt.announcements import describe_costs
from adacc_hf.adapt.checkpoint_files import Saved
from adacc_hf.adapt.coverage import ALL_BLOCKS, describe_blocks, refuse_uncovered, refuse_whole_blocks
from adacc_hf.adapt.events import PolicySet, predictions
from adacc_hf.adapt.first_steps import CHECKPOINT
from adacc_hf.adapt.fixed_policy_phase import FixedPolicyPhase
from adacc_hf.adapt.oom_retry import memory_reported, run_with_retry
from adacc_hf.adapt.policy_builder import PolicyBuilder
from adacc_hf.adapt.run_state import Phase, RunState, check_called
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import UncalledBlocksError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.head.head import ChunkedHead
from adacc_hf.price.heads import ComputeLoss
from adacc_hf.price.idle_blocks import ExecutedBlocks, describe_uncalled
from adacc_hf.run.blocks import CheckpointStrategy, Installation
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes, batch_shapes, describe
from adacc_hf.torch_glue.distributed import gather_from_all_ranks
from adacc_hf.torch_glue.progress import announce

log = logging.getLogger(__name__)


MOST_STEPS = 64
"""Maximum number of steps to wait for a batch on which the model runs every block. After these steps, an error is
raised.

If one batch in eight has an image, the probability that 64 steps have no image is 1 in 5,000."""


class WarmUpPhase(Phase):
    """Phase of a run before the first policy. Every block runs under torch's checkpoint until a batch is profiled."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._profiler, self._batches = run.profiler, run.batches
        self._builder = PolicyBuilder(run)
        self._checkpointing = FullRecompute(run.model, run.config)
        self._batches.keep_last(run.model)
        self._step = 0
        """Number of finished steps when the current step began."""
        self._has_tried = False
        """True after the attempt to set a policy before the first forward."""
        self._is_checked = False
        """True after the first step that called the model. The loop may skip batches, for example without labels."""
        self._profile_error: torch.OutOfMemoryError | None = None
        """Error if memory ran out while profiling before the first forward, else None."""

    @property
    def activity(self) -> str:
        """Text for reports on how the blocks run in the current step: in this phase, always under torch's
        checkpoint."""
        return CHECKPOINT

    def begin_step(self, step: int) -> None:
        self._step = step

    def begin_micro_batch(self, inputs: Any) -> None:
        self._batches.begin()
        self._checkpointing.begin_step()
        self._profiler.inner_steps.open()
        self._meet(inputs)

    def _meet(self, inputs: Any) -> None:
        if self._batches.read_shapes(inputs):
            self._checkpointing.sizes.add(self._batches.shapes)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which trains on the micro-batch, and return its result.

        `run` may set the first policy. If memory then runs out, call `run` again under a policy that needs less memory.
        """
        report = self._run.memory_report
        if not self._run.config.retry_out_of_memory:
            with memory_reported(report):
                return run()
        try:
            # Looked up at the time of the error, because the phase may change within `run`.
            return run_with_retry(
                run, self._run.model, lambda: self._run.phase.tighten(), lambda: self._run.phase.advice(), report
            )
        except torch.OutOfMemoryError:
            if self._profile_error is not None:
                raise self._profile_error from None
            raise

    def end_micro_batch(self) -> None:
        self._profiler.inner_steps.close()
        self._run.stats.add_early(self._batches.known_shapes)

    def begin_forward(self, inputs: Any, compute_loss: ComputeLoss | None, is_certain: bool = False) -> None:
        self._meet(inputs)
        if self._run.num_steps == 0 and not self._has_tried:
            self._has_tried = True
            self._set_policy_before_forward(inputs, compute_loss)
        self._batches.note_loss_call(inputs, compute_loss, is_certain)

    def _set_policy_before_forward(self, inputs: Any, compute_loss: ComputeLoss | None) -> None:
        """Profile the first batch before its forward, run the solver, and follow the resulting policy.

        If the batch cannot be profiled, log the reason. The first steps then run under torch's checkpoint.
        """
        run, model = self._run, self._run.model
        if not isinstance(inputs, Mapping):
            self._profiler.note_unpredicted(f"inputs of type {type(inputs).__name__} are not profiled, only mappings")
            return
        if self._profiler.must_wait(model):
            self._profiler.note_unpredicted("a torch profiler is active")
            return
        self._checkpointing.remove()
        self._profile_error = None
        if run.source is None or callable(run.source):
            announce(
                "Adacc: memory_budget=%r: profiling the first batch (%s); the first step begins when a policy is set",
                run.config.memory_budget,
                describe(batch_shapes(inputs)),
            )
        try:
            first = self._builder.before_first_step(dict(inputs), compute_loss)
        except BaseException as error:
            self._profile_error = error if isinstance(error, torch.OutOfMemoryError) else None
            self._begin_checkpointing()  # the loop may catch the error, such as an interrupt, and go on
            raise
        if first is None:
            self._begin_checkpointing()
            return
        self._batches.drop()
        if run.source is not None:
            self._profiler.remove()  # a user's policy never changes
        profile, policy = first
        run.phase = following = follow(run, policy, profile, self._step)
        following.begin_in_step(profile, policy, self._step)
        run.note(PolicySet(step=self._step, **predictions(policy)))
        run.save(changed=True)

    def _begin_checkpointing(self) -> None:
        """Install torch's checkpoint again after a profile, because there is no policy."""
        sizes = self._checkpointing.sizes
        self._checkpointing = FullRecompute(self._run.model, self._run.config)
        self._checkpointing.begin_step()
        self._checkpointing.sizes |= sizes | {self._batches.shapes}

    def note_loss(self, result: Any, inputs: Any) -> None:
        self._batches.note_loss(result)

    def begin_optimizer_step(self) -> None:
        self._run.watch_optimizer()

    def end_optimizer_step(self) -> None:
        self._profiler.optimizer.end()

    def end_step(self, step: int) -> None:
        run = self._run
        has_called = self._batches.has_called or any(block.num_calls for block in self._checkpointing.blocks.values())
        if has_called and not self._is_checked:
            self._is_checked = True
            check_called(self._checkpointing)
        num_more = run.num_steps - run.config.profile_steps
        if num_more < 0 or (num_more < MOST_STEPS and not any(gather_from_all_ranks(has_called))):
            return
        if self._profiler.must_wait(run.model):
            reason, remedy = "a torch profiler is active", "let it end within the first profile_steps"
        elif skipped := skipped_on_any_rank(self._checkpointing, num_more):
            reason, remedy = (
                f"the batch leaves out {describe_blocks(skipped)}",
                "begin with a batch that calls every block",
            )
        else:
            self._set_policy_after_step(step)
            return
        refuse_uncovered(run.config, ALL_BLOCKS, f"{reason}, so it cannot be profiled", remedy)

    def _set_policy_after_step(self, step: int) -> None:
        """Profile the most recent batch, run the solver, and follow the resulting policy from the next step on."""
        run = self._run
        announce(
            "Adacc: memory_budget=%r: profiling after step %d; the next step begins when a policy is set",
            run.config.memory_budget,
            step,
        )
        self._profiler.all_sizes = any(gather_from_all_ranks(len(self._checkpointing.sizes) > 1))
        self._checkpointing.remove()  # the profiler's wrappers must not enclose the checkpointing wrappers
        try:
            profile, policy, is_provisional = self._builder.after_steps(*self._batches.take())
        except BaseException:  # the loop may catch the error, such as an interrupt, and go on
            self._begin_checkpointing()
            self._batches.keep_last(run.model)
            raise
        run.phase = following = follow(run, policy, profile, step)
        following.begin_after_step(profile, policy, is_provisional)
        run.note(PolicySet(step=step, fallback_steps=run.num_steps, **predictions(policy)))
        run.save(changed=True)

    def abandon_step(self) -> None:
        self._profiler.remove()
        self._has_tried = False  # the error that broke the step off may have broken off the profile, too

    def ends(self) -> None:
        num_steps, config = self._run.num_steps, self._run.config
        if num_steps:
            # No error even with on_uncovered="error", which allows profile_steps steps: all steps are done.
            log.warning(
                "Adacc: training ended after %d step%s, before a policy was set, and all blocks ran under torch's "
                "checkpoint: train for more steps than profile_steps=%d, or set a smaller profile_steps",
                num_steps,
                "" if num_steps == 1 else "s",
                config.profile_steps,
            )

    def remove(self) -> None:
        self._checkpointing.remove()
        self._profiler.remove()
        self._batches.drop()


class FullRecompute(Installation):
    """Installation of torch's own checkpoint in every block.

    The model's head is chunked if the config allows no other head.
    """

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self._head = ChunkedHead(model) if config.heads == ("chunked",) else None
        try:
            super().__init__(model, config.block_classes)
        except BaseException:
            self._remove_head()
            raise
        for function in self.blocks.values():
            function.strategy = CheckpointStrategy()
        self.sizes: set[BatchShapes] = set()
        """Distinct shapes of the micro-batches that have run so far."""
        self._executed = ExecutedBlocks(self.modules)

    def begin_step(self) -> None:
        super().begin_step()
        self._executed.names.clear()

    def skipped_blocks(self) -> list[str]:
        """Return the names of the blocks that were expected to train on the most recent batch, but did not.

        If the batch trained no block at all, return the names of all blocks. Otherwise, leave out blocks that ran
        without gradients (frozen blocks), because these blocks store no activations.
        """
        untrained = super().skipped_blocks()
        if len(untrained) == len(self.blocks):
            return untrained
        return [name for name in untrained if name not in self._executed.names]

    def remove(self) -> None:
        super().remove()
        self._executed.remove()
        self._remove_head()

    def _remove_head(self) -> None:
        if self._head is not None:
            self._head.remove()


def skipped_on_any_rank(installation: FullRecompute, num_waited: int) -> list[str]:
    """Return the names of the blocks that, on some rank, the model did not run on the most recent batch.

    A batch is profiled only if the result is empty. If it is not empty and `num_waited`, the number of steps waited so
    far, is at least MOST_STEPS, raise UncalledBlocksError.
    """
    skipped = set().union(*gather_from_all_ranks(installation.skipped_blocks()))
    skipped_blocks = [name for name in installation.blocks if name in skipped]
    if skipped_blocks and num_waited >= MOST_STEPS:
        raise UncalledBlocksError(describe_uncalled(installation, skipped_blocks, f"by the last of {num_waited} steps"))
    return skipped_blocks


def follow(run: RunState, policy: Policy, profile: Profile | None, policy_step: int) -> FixedPolicyPhase:
    """Apply `policy` to the model, and return the phase that trains under this policy.

    `policy_step` is the number of finished steps when the policy was set. If the user passed the policy, or `profile`
    is None, the policy never changes. Raises UncoveredBlockError if the config requires a policy for all blocks and
    `policy` does not cover all blocks.
    """
    if profile is not None:
        refuse_whole_blocks(run.config, policy, profile)
    handle = PolicyHandle(run.model, policy, run.config.block_classes, profile)
    run.show(policy, profile)
    announce("Adacc: policy set: %s", describe_costs(policy, profile))
    if run.source is None and profile is not None:
        return AdaptivePhase(run, handle, policy_step)
    return FixedPolicyPhase(run, handle)


def resume(run: RunState, saved: Saved, step: int) -> None:
    """Begin the run with the policies of `saved`: the policies of a checkpoint, or the policy that the user passed.

    `step` is the number of finished steps.
    """
    first = saved.size_policies[0]
    run.history = list(saved.history)
    policy_step = step if saved.policy_step is None else saved.policy_step
    run.phase = following = follow(run, first.policy, first.profile, policy_step)
    following.resume(saved)
    run.note(PolicySet(step=step, **predictions(first.policy)))
    run.save(changed=True)
