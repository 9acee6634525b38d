"""FixedPolicyPhase: training under one policy, which is not adapted to the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adacc_hf.adapt.checkpoint_files import Saved, save_in_checkpoint
from adacc_hf.adapt.fallback_stats import describe_coverage
from adacc_hf.adapt.oom_retry import memory_reported
from adacc_hf.adapt.policy_checks import refuse_fallbacks
from adacc_hf.adapt.run_state import Phase, RunState, check_called
from adacc_hf.kernels._host_pool import host_pool
from adacc_hf.run.policy_handle import PolicyHandle
from adacc_hf.torch_glue.progress import announce


class FixedPolicyPhase(Phase):
    """Phase of a run that trains under a fixed policy, which is not adapted to the data."""

    def __init__(self, run: RunState, handle: PolicyHandle) -> None:
        self._run = run
        self.handle = handle
        self._must_check = True
        self._has_forward = False

    def attempt(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which trains on the micro-batch, once, because the policy is fixed. Return its result."""
        with memory_reported(self._run.memory_report):
            return run()

    def begin_forward(self, inputs: Any) -> None:
        self._has_forward = True

    def begin_micro_batch(self, inputs: Any) -> None:
        self.handle.installation.begin_step()
        self.handle.tape_cache.fallbacks.clear()

    def end_micro_batch(self) -> None:
        fallbacks = self.handle.tape_cache.fallbacks
        refuse_fallbacks(self._run.config, fallbacks)
        self._run.stats.add(self._run.active_policy.predicted_overhead_ms, fallbacks.counts)

    def end_step(self, step: int) -> None:
        if self._run.stats.reasons:
            self._run.count_step(step)
        if self._must_check and self._has_forward:  # a loop may skip the first batches
            self._must_check = False
            check_called(self.handle.installation)

    def figures(self, logs: dict[str, float], is_on_all_ranks: bool) -> dict[str, float]:
        run, policy, overhead_ms = self._run, self._run.active_policy, self._run.stats.overhead_ms
        figures = {
            "adacc/stored_gib": policy.predicted_stored_bytes / 2**30,
            "adacc/peak_gib": policy.predicted_peak_bytes / 2**30,
            "adacc/overhead_ms": policy.predicted_overhead_ms if overhead_ms is None else overhead_ms,
        }
        if policy.predicted_host_bytes:
            figures["adacc/host_gib"] = policy.predicted_host_bytes / 2**30
            figures["adacc/measured_host_gib"] = host_pool.take_peak() / 2**30
        if run.profile is not None:
            figures["adacc/compression_rate"] = policy.predicted_stored_bytes / run.profile.plain_stored_bytes
        if is_on_all_ranks:
            run.stats.logged()
        return figures | run.fallback_figures()

    def save(self, folder: Path) -> None:
        save_in_checkpoint(folder, self._saved(), self._run.profile)
        self._run.save()

    def _saved(self) -> Saved:
        run = self._run
        return Saved(
            policies=[run.active_policy],
            memory_budget=run.config.memory_budget,
            host_memory=run.config.host_memory,
            history=run.history,
            step=run.step,
        )

    def ends(self) -> None:
        run = self._run
        run.save()
        announce("Adacc: %s", describe_coverage(run.active_policy, run.profile, run.history))

    def remove(self) -> None:
        self.handle.remove()
