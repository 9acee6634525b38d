"""Controller: keeps a run's policies in step with its data, once the first policy is set.

NOTE [Timetable of a step]. All ranks do the same at the same step.
1. Step begins: a tracking step measures outliers and gradients. The memory of the next normal step is measured.
2. Micro-batch: the policy for its size is applied (policy_choice.py). If the micro-batch runs out of memory, it runs
   again under a tighter policy.
3. Step ends: a) measurements change the prices (tracking_steps.py, peak_check.py); b) results of solver runs that began
   `takeover_steps` steps ago are applied; c) solver runs start where prices have changed (replanning.py); d) sizes
   that were seen often, and batches that train more blocks, are requested for a profile (profile_requests.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from adacc_hf.adapt.checkpoint_files import Saved
from adacc_hf.adapt.codec_guard import LossGuard
from adacc_hf.adapt.events import Event
from adacc_hf.adapt.oom_retry import advice
from adacc_hf.adapt.peak_check import PeakCheck
from adacc_hf.adapt.policy_choice import PolicyChoice
from adacc_hf.adapt.profile_requests import ProfileRequests
from adacc_hf.adapt.replanning import Replanning
from adacc_hf.adapt.restart import MORE_BLOCKS
from adacc_hf.adapt.run_context import RunContext
from adacc_hf.adapt.size_policy import SizePolicy
from adacc_hf.adapt.tracking_steps import TrackingSteps
from adacc_hf.artifacts.config import AdaccConfig
from adacc_hf.artifacts.policy import Policy
from adacc_hf.artifacts.profile import Profile
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.batch_shapes import BatchShapes


class Controller:
    """Controller of one run's policies."""

    def __init__(
        self,
        handle: PolicyHandle,
        config: AdaccConfig,
        policy_step: int,
        note: Callable[[Event], None],
        num_micro: int,
        num_uncounted: int,
    ) -> None:
        """
        Args:
            policy_step: finished steps when the first policy was set.
            note: function that appends an event to the run's history.
            num_micro: micro-batches of a step.
            num_uncounted: number of batches that are live before a step begins. Measurements of a step do not include
            them.
        """
        self.context = RunContext(config, policy_step, note, LossGuard(config), step=policy_step)
        self.choice = PolicyChoice(handle, self.context)
        self.replanning = Replanning(self.choice, self.context, num_micro)
        self.requests = ProfileRequests(self.choice, handle.installation)
        self.is_busy = False
        """True if the end of the most recent step had work to do.

        The caller of `end_step` adds its time to `context.extra_ms`.
        """
        self._tracking = TrackingSteps(self.choice, self.replanning, self.context)
        self._peaks = PeakCheck(self.choice, self.replanning, self.context, num_uncounted)
        self._installation = handle.installation

    @property
    def shown(self) -> SizePolicy:
        """Size policy that logs and reports show."""
        return self.choice.shown

    def restart(self, shapes: BatchShapes | None, profile: Profile, policy: Policy) -> None:
        """Replace all policies of the run by `policy`, solved for `profile` of a batch of `shapes`.

        The policies for other batch sizes are dropped, because they were made for the operators and the trained blocks
        of earlier batches.
        """
        self.cancel()
        self.choice.cache.all.clear()
        self.requests.restart.tried.discard(MORE_BLOCKS)
        self.choice.add(shapes, profile, policy)

    def begin_step(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """Begin step number `step`, counted from 1."""
        self.context.step = step
        self.choice.begin_step()
        self._peaks.begin_step()
        self._tracking.begin_step(step)
        self._peaks.measure_if_due(self._tracking.is_on, model, optimizer, self._installation)

    def end_backward(self) -> None:
        """End the measurement of memory, because policies have no effect on the optimizer's step."""
        self._peaks.end_backward()

    def end_step(self, step: int) -> bool:
        """End step number `step`. Return True if a policy changed."""
        was_tracking, was_counting = self._tracking.is_on, self._peaks.is_on
        self._peaks.end_step(was_tracking)
        self.is_busy = was_tracking or was_counting or self.replanning.has_due(step)
        has_changed = False
        if was_tracking:
            self._tracking.finish(step)
        elif was_counting:
            has_changed = self._peaks.compare(step)
        self._peaks.close()
        has_changed |= self.replanning.take_over(step)
        self.requests.end_step(step - self.context.policy_step)
        return has_changed

    def read_logs(self, logs: Mapping[str, float]) -> None:
        """Look for a suspicious loss in `logs`, which all ranks log at this step. The next step then checks codecs."""
        has_lossy = any(size_policy.replanner.has_work() for size_policy in self.choice.cache.all)
        self.context.guard.logged(logs, has_lossy)

    def tighten(self, step: int) -> str | None:
        """Follow a policy with less memory after `step` ran out of memory. If that is impossible, return the reason."""
        self.cancel()
        return self.replanning.tighten(step)

    def advice(self) -> str:
        """Return advice on the settings with which a step fits in memory."""
        return advice(self.shown.replanner)

    def cancel(self) -> None:
        """Stop measuring. Has no effect if no measurement is running."""
        self._tracking.cancel()
        self._peaks.close()

    def saved(self, history: list[dict[str, Any]]) -> Saved:
        """Return the state that a resumed run needs."""
        context, guard, shown = self.context, self.context.guard, self.shown
        others = [other for other in self.choice.cache.all if other is not shown]
        return Saved(
            size_policies=[size_policy.saved() for size_policy in (shown, *others)],
            policy_step=context.policy_step,
            memory_budget=context.config.memory_budget,
            tightened=context.tightened,
            history=history,
            losses=guard.losses,
            suspicion=guard.suspicion,
            switched_off=sorted(guard.switched_off),
            is_unproven=guard.is_unproven,
            tracking_ms=context.extra_ms,
            missing_bytes=dict(context.missing_bytes),
            counted_elements=context.counted_elements,
        )

    def resume(self, saved: Saved) -> None:
        """Restore the state of `saved`. Start the solver again where it was running when the state was saved."""
        context = self.context
        context.extra_ms, context.tightened = saved.tracking_ms, saved.tightened
        context.missing_bytes, context.counted_elements = dict(saved.missing_bytes), saved.counted_elements
        context.guard = LossGuard(context.config, saved.losses, saved.switched_off)
        context.guard.suspicion, context.guard.is_unproven = saved.suspicion, saved.is_unproven
        for record in reversed(saved.size_policies):
            if record.profile is not None:  # without its file, the policy is made again when its size comes
                added = self.choice.add(record.shapes, record.profile, record.policy, is_extrapolated=record.is_told)
                added.resume(record)
