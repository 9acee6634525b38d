"""WarmUpPhase: training before the first policy of a run. `follow` begins the phases with a policy.

NOTE [Phases of a run]
| phase | blocks run under | begins | ends |
|---|---|---|---|
| Phase | nothing | before and after a run | `AdaccSession.begin` |
| WarmUpPhase | torch's checkpoint | a run, a resumed run, other blocks or operators | the first policy, after a step |
| FixedPolicyPhase | the user's policy, unchanged | such a policy | the run's end |
| AdaptivePhase | policies that follow the data | the first solved policy | the run's end |
| CompiledRun | compiled graphs (compiler/compiled_run.py) | a model compiled as a whole | the run's end |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from adacc_hf.adapt.history import describe_costs, predictions
from adacc_hf.adapt.oom_retry import run_with_retry
from adacc_hf.adapt.policy_checks import ALL_BLOCKS, describe_blocks, refuse_uncovered, refuse_whole_blocks
from adacc_hf.adapt.policy_fit import first_policy
from adacc_hf.adapt.policy_phases import AdaptivePhase, FixedPolicyPhase
from adacc_hf.adapt.run_state import Phase, RunState, check_called
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.errors import InfeasibleBudgetError, UncalledBlocksError
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.head.head import ChunkedHead
from adacc_hf.price.idle_blocks import ExecutedBlocks, describe_uncalled
from adacc_hf.run.blocks import CheckpointStrategy, Installation
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.distributed import gather_from_all_ranks
from adacc_hf.torch_glue.progress import announce

log = logging.getLogger(__name__)

ADVICE = "Use a smaller batch or shorter sequences"
MOST_FAILURES = 2  # recorded micro-batches that may run out of memory before no other one is recorded
MOST_STEPS = 64
"""Maximum number of steps to wait for a batch on which the model runs every block. After these steps, the policy leaves
the other blocks out.

If one batch in eight has an image, the probability that 64 steps have no image is 1 in 5,000."""
MOST_TILE_STEPS = 16
"""Maximum number of steps to wait for a batch of the profiled sizes, to profile it with modules in tiles."""


class WarmUpPhase(Phase):
    """Phase of a run before the first policy. Blocks run under torch's checkpoint, except in the micro-batch that is
    recorded for the profile (price/live_step.py)."""

    def __init__(self, run: RunState, saved: Sequence[Policy] = (), reason: str | None = None) -> None:
        """Begin a run, with the `saved` policies of a checkpoint if it is resumed, or again, for a `reason`."""
        super().__init__(run)
        self._saved, self._reason = saved, reason
        self._num_before = run.num_steps
        """Number of finished steps of the run before this phase."""
        self._profiler = run.profiler
        self._checkpointing = FullRecompute(run.model, run.config)
        self._num_begun = 0
        """Number of micro-batches that have begun in the current step."""
        self._has_forward = False
        """True after the first forward. The loop may skip batches, for example without labels."""
        self._is_checked = False
        """True after the first step that called the model."""
        self._infeasible: BaseException | None = None
        """The error if no policy without tiles fits the budget, while a step with modules in tiles is awaited."""
        self._num_waited = 0
        """Number of steps that had other sizes than the awaited one."""
        self._num_failures, self._is_retry = 0, False
        """Number of recorded micro-batches in which memory ran out, and True in the step of the latest one."""
        run.corrections.static_bytes = 0  # the new profile counts them
        if reason is not None:
            announce("Adacc: a step is profiled again, because %s", reason)
        elif run.source is None or callable(run.source):
            announce("Adacc: memory_budget=%r: the first step is profiled while it trains", run.config.memory_budget)

    def begin_step(self, step: int) -> None:
        self._num_begun, self._is_retry = 0, False

    def begin_micro_batch(self, inputs: Any) -> None:
        self._checkpointing.begin_step()
        self._profiler.watch_steps()
        self._num_begun += 1
        if inputs is None and self._is_to_be_recorded():  # a loop of the user's may call blocks before the model
            self._record(None)

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run` and return its result. If memory runs out while a call is recorded, call it again unrecorded."""
        state, retries = self._run, self._run.config.retry_out_of_memory
        return run_with_retry(run, state.model, self._tighten, lambda: ADVICE, state.memory_report, retries)

    def _tighten(self) -> str | None:
        """Record nothing more in this step. Return None, or the reason why that does not help."""
        if self._run.has_stepped:
            return "the optimizer has begun to change the weights"
        if not self._profiler.is_recording:
            return "it ran under full recomputation already"
        self._profiler.cancel()
        self._num_failures, self._is_retry = self._num_failures + 1, True
        self._run.note("memory", reason="out of memory while a micro-batch was recorded")
        return None

    def end_micro_batch(self) -> None:
        self._profiler.end_backward()
        self._profiler.ignore_steps()

    def begin_forward(self, inputs: Any) -> None:
        self._has_forward = True
        if self._profiler.is_recording:
            self._profiler.enter_forward(inputs)
        elif self._is_to_be_recorded():
            self._record(inputs)

    def _is_to_be_recorded(self) -> bool:
        """Return True if the micro-batch that begins is to be recorded."""
        profiler, run = self._profiler, self._run
        is_turn = profiler.is_turn(self._num_begun, run.model) and run.num_steps >= run.loop.num_unrecorded_steps
        is_possible = is_turn and not self._is_retry and self._num_failures < MOST_FAILURES
        return is_possible and profiler.live is None and not profiler.must_wait(run.model)

    def _record(self, inputs: Any) -> None:
        checkpointing = self._checkpointing
        self._profiler.begin(checkpointing, self._run.optimizer, inputs, head=checkpointing.head)

    def begin_optimizer_step(self) -> None:
        super().begin_optimizer_step()
        self._profiler.begin_optimizer(self._run.model)

    def end_optimizer_step(self) -> None:
        self._profiler.end_optimizer()

    def end_step(self, step: int) -> None:
        run = self._run
        self._profiler.end_backward()
        live = self._profiler.live
        if live is not None and not live.recorder.has_run:  # the loop has skipped the batch
            self._profiler.cancel()
            self._has_forward = self._is_checked
        if self._has_forward and not self._is_checked:
            self._is_checked = True
            check_called(self._checkpointing, self._checkpointing.executed)
        num_more = run.num_steps - self._num_before - run.config.profile_steps
        if not all(gather_from_all_ranks(self._profiler.live is not None)):
            self._profiler.cancel()
            if num_more < 0 or not any(gather_from_all_ranks(self._has_forward)):
                return
            reason, remedy = "no micro-batch was recorded", "let a torch profiler end within the first profile_steps"
            if self._num_failures:
                reason, remedy = "memory ran out while it was recorded", "use a smaller batch"
        elif skipped := skipped_on_any_rank(self._checkpointing, num_more):
            self._profiler.cancel()
            reason, remedy = (
                f"the batch leaves out {describe_blocks(skipped)}",
                "begin with a batch that calls every block",
            )
        else:
            self._set_policy()
            return
        if num_more >= 0:
            refuse_uncovered(run.config, ALL_BLOCKS, f"{reason}, so it cannot be profiled", remedy)

    def _set_policy(self) -> None:
        """Profile the recorded micro-batch, solve, and follow the policy from the next step on."""
        run, checkpointing = self._run, self._checkpointing
        assert self._profiler.live is not None  # every rank has recorded a micro-batch
        if not any(gather_from_all_ranks(bool(self._profiler.live.called))):
            text = describe_uncalled(checkpointing, list(checkpointing.modules), "in a step", checkpointing.executed)
            raise UncalledBlocksError(text)
        if self._infeasible is None:
            profile = self._profiler.take(run.model, run.optimizer)
            assert profile is not None
        else:
            profile = self._profiler.take_tiles(run.model)
            if profile is None:
                self._num_waited += 1
                if self._num_waited == MOST_TILE_STEPS:
                    checkpointing.remove()
                    raise self._infeasible
                return
        shapes = profile.measured[0][0]
        try:
            policy = first_policy(run, run.corrections.applied(profile, shapes), self._saved)
        except BaseException as error:
            is_refused = isinstance(error, InfeasibleBudgetError)
            if is_refused and self._infeasible is None and self._profiler.begin_tiles(profile, checkpointing):
                announce("Adacc: no policy fits the budget, so a step with modules in tiles is profiled too")
                self._infeasible = error
                return
            checkpointing.remove()
            raise
        checkpointing.remove()
        run.phase = follow(run, policy, profile)
        num_steps = run.num_steps - self._num_before
        run.note("policy", reason=self._reason, fallback_steps=num_steps, **predictions(policy))
        run.save()

    def ends(self) -> None:
        num_steps, config = self._run.num_steps, self._run.config
        if self._reason is not None:
            self._run.save()
        elif num_steps:
            # No error even with on_uncovered="error", which allows profile_steps steps: all steps are done.
            log.warning(
                "Adacc: training ended after %d step%s, before a policy was set, and all blocks ran under torch's "
                "checkpoint: train for more steps than profile_steps=%d, or set a smaller profile_steps",
                num_steps,
                "" if num_steps == 1 else "s",
                config.profile_steps,
            )

    def remove(self) -> None:
        self._profiler.remove()
        self._checkpointing.remove()


class FullRecompute(Installation):
    """Installation of torch's own checkpoint in every block, with a chunked head if the config allows no other."""

    def __init__(self, model: nn.Module, config: AdaccConfig) -> None:
        self.head = ChunkedHead(model) if config.heads == ("chunked",) else None
        try:
            super().__init__(model, config.block_classes)
        except BaseException:
            self._remove_head()
            raise
        for call in self.calls.values():
            call.strategy = CheckpointStrategy()
        self.executed = ExecutedBlocks(self.modules)

    def begin_step(self) -> None:
        super().begin_step()
        self.executed.names.clear()

    def skipped_blocks(self) -> list[str]:
        """Return the names of the blocks that the latest batch did not run. Frozen blocks count if none has trained."""
        untrained = super().skipped_blocks()
        if len(untrained) == len(self.blocks):
            return untrained
        return [name for name in untrained if name not in self.executed.names]

    def remove(self) -> None:
        super().remove()
        self.executed.remove()
        self._remove_head()

    def _remove_head(self) -> None:
        if self.head is not None:
            self.head.remove()


def skipped_on_any_rank(installation: FullRecompute, num_waited: int) -> list[str]:
    """Return the names of the blocks that, on some rank, the model did not run on the most recent batch. After
    MOST_STEPS steps of waiting (`num_waited`), return [] if all ranks have left out the same blocks, or raise
    UncalledBlocksError."""
    by_rank = gather_from_all_ranks(installation.skipped_blocks())
    skipped_blocks = [name for name in installation.blocks if any(name in skipped for skipped in by_rank)]
    if not skipped_blocks or num_waited < MOST_STEPS:
        return skipped_blocks
    text = describe_uncalled(installation, skipped_blocks, f"by the last of {num_waited} steps")
    if len(skipped_blocks) == len(installation.blocks) or any(skipped != by_rank[0] for skipped in by_rank):
        raise UncalledBlocksError(text)
    log.warning(
        "Adacc: %s. The policy leaves these blocks out, and they run under torch's checkpoint if a later batch calls "
        "them. To begin the next run with a policy, pass policy=... the policy file of this run",
        text,
    )
    return []


def follow(run: RunState, policy: Policy, profile: Profile | None) -> FixedPolicyPhase:
    """Apply `policy` to the model, and return the phase that trains under this policy, which never changes if it comes
    from the user. Raises UncoveredBlockError if the config requires a policy for all blocks."""
    if profile is not None:
        refuse_whole_blocks(run.config, policy, profile)
    handle = PolicyHandle(run.model, policy, run.config.block_classes, profile)
    run.policy, run.profile = policy, profile
    announce("Adacc: policy set: %s", describe_costs(policy, profile))
    if run.source is None and profile is not None:
        return AdaptivePhase(run, handle, profile, policy, lambda reason: WarmUpPhase(run, reason=reason))
    return FixedPolicyPhase(run, handle)
